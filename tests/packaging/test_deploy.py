"""What deploys the service passes the tools that judge such files, and agrees with the service's own settings.

A variable, path, port or version that the service does not know fails here, not on a cluster."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner import __version__
from planner_api.services import QUICK_PROCESSES
from planner_api.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES_VERSIONS = ("1.30", "1.37")  # the oldest that the manifest names, the newest that is known
PORT = Settings.model_fields["port"].default
# What a process takes that starts searches but runs none; a search may take PLANNER_SOLVE_MEMORY_BYTES.
OWN_MEMORY_BYTES = 768 * 1024**2


def tool(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """A command of the extra `test`, run beside the interpreter of these tests; a missing one fails."""
    command = Path(sysconfig.get_path("scripts")) / name
    if not command.exists():
        command = Path(sys.executable).with_name(name)
    return subprocess.run([str(command), *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=300)


def read(name: str) -> str:
    return (DEPLOY / name).read_text(encoding="utf-8")


def size(text: str) -> int:
    """Bytes of a quantity as Kubernetes (`7Gi`) or compose (`4g`) writes it."""
    number, unit = re.fullmatch(r"(\d+)([MG]i|[mg])", text).groups()  # type: ignore[union-attr]
    scale: int = 1024 ** {"m": 2, "g": 3}[unit[0].lower()]
    return int(number) * scale


def seconds(text: str) -> int:
    return int(text.removesuffix("s"))


@dataclass(frozen=True)
class Container:
    """One container of ours, however it is described."""

    name: str
    image: str
    arguments: list[str]
    variables: dict[str, str]
    """Value of each variable; of a secret, the empty text."""
    memory_bytes: int
    grace_s: int
    """Time between the request to end and the kill, without what passes before the request."""


def documents() -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(read("kubernetes.yaml")) if document]


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [document for document in documents() if document["kind"] == kind]


def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(read("compose.yaml"))["services"]
    return found


def kubernetes_containers() -> Iterator[Container]:
    (settings,) = of_kind("ConfigMap")
    for deployment in of_kind("Deployment"):
        pod = deployment["spec"]["template"]["spec"]
        for described in pod["containers"]:
            before = described.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
            own = {variable["name"]: variable.get("value", "") for variable in described["env"]}
            yield Container(
                name=f"kubernetes {described['name']}",
                image=described["image"],
                arguments=described["args"],
                variables=settings["data"] | own,
                memory_bytes=size(described["resources"]["limits"]["memory"]),
                grace_s=pod["terminationGracePeriodSeconds"] - before,
            )


def compose_containers() -> Iterator[Container]:
    for name, described in services().items():
        if "build" in described:
            yield Container(
                name=f"compose {name}",
                image=described["image"],
                arguments=described["command"],
                variables=described["environment"],
                memory_bytes=size(described["mem_limit"]),
                grace_s=seconds(described["stop_grace_period"]),
            )


CONTAINERS = [*kubernetes_containers(), *compose_containers()]
each_container = pytest.mark.parametrize("container", CONTAINERS, ids=[container.name for container in CONTAINERS])


def test_dockerfile_passes_hadolint() -> None:
    """The Dockerfile follows hadolint's rules."""
    done = tool("hadolint", DEPLOY / "Dockerfile")
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_yaml_passes_yamllint() -> None:
    """No doubled key, no dangling alias, one style."""
    done = tool("yamllint", "-s", "-c", DEPLOY / "yamllint.yaml", DEPLOY)
    assert done.returncode == 0, done.stdout + done.stderr


def test_compose_passes_its_specification() -> None:
    """The file is one by the JSON schema of the Compose Specification."""
    done = tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", DEPLOY / "compose.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_manifest_passes_kubernetes_schemas(version: str) -> None:
    """Every object is one by the published schemas, and no field is unknown."""
    done = tool("kubernetes-validate", "--strict", "-k", version, DEPLOY / "kubernetes.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (done.stdout + done.stderr).count(" passed ") == len(documents())


def test_the_tools_refuse(tmp_path: Path) -> None:
    """A field misspelt and an image without version are found: the tools above do judge."""
    (tmp_path / "kubernetes.yaml").write_text(read("kubernetes.yaml").replace("readinessProbe", "readynessProbe"))
    assert tool("kubernetes-validate", "--strict", tmp_path / "kubernetes.yaml").returncode != 0
    (tmp_path / "compose.yaml").write_text(read("compose.yaml").replace("mem_limit", "memory_limit"))
    compose = tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", tmp_path / "compose.yaml")
    assert compose.returncode != 0
    (tmp_path / "Dockerfile").write_text(re.sub(r"python:[\w.-]+", "python:latest", read("Dockerfile")))
    assert tool("hadolint", tmp_path / "Dockerfile").returncode != 0


@each_container
def test_variables_are_settings(container: Container) -> None:
    """Each PLANNER_ variable is a setting of the service, and its value is one that the setting takes."""
    ours = {name: value for name, value in container.variables.items() if name.startswith("PLANNER_")}
    assert "PLANNER_DATABASE_URL" in ours
    assert {name.removeprefix("PLANNER_").lower() for name in ours} <= set(Settings.model_fields)
    plain = {name: re.sub(r"\$\{\w+:[?-](.*?)\}", r"\1", value) for name, value in ours.items() if value}
    given = {name.removeprefix("PLANNER_").lower(): value for name, value in plain.items()}
    assert Settings.model_validate(given).port == PORT


def test_variables_elsewhere_are_settings() -> None:
    """Nor do the image, the example of an environment and the document name a variable that does nothing."""
    texts = {name: read(name) for name in ("Dockerfile", "env.example", "compose.yaml", "kubernetes.yaml")}
    texts["service.md"] = (ROOT / "docs" / "service.md").read_text(encoding="utf-8")
    for name, text in texts.items():
        found = {variable.lower() for variable in re.findall(r"\bPLANNER_([A-Z_]+[A-Z])\b", text)}
        assert found, name
        assert found <= set(Settings.model_fields), name


@each_container
def test_commands_exist(container: Container) -> None:
    """The container starts a command of ours with options that it has."""
    command = [sys.executable, "-m", "planner", container.arguments[0], "--help"]
    help_text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert help_text.returncode == 0, help_text.stderr
    for option in container.arguments[1:]:
        assert not option.startswith("--") or option in help_text.stdout


@each_container
def test_memory_holds_the_searches(container: Container) -> None:
    """The limit of the container is above what its searches may take, so that a search meets its own limit first."""
    searches = int(container.variables["PLANNER_WORKERS"])
    assert (searches > 0) == (container.arguments[0] == "worker")
    # A worker only searches; who answers has the quick processes.
    needed = (searches or QUICK_PROCESSES) * int(container.variables["PLANNER_SOLVE_MEMORY_BYTES"]) + OWN_MEMORY_BYTES
    assert container.memory_bytes >= needed


@each_container
def test_time_to_end(container: Container) -> None:
    """The container is killed only after the service gave its searches the time to end, and itself a moment more."""
    assert container.grace_s >= float(container.variables["PLANNER_SHUTDOWN_GRACE_S"]) + 5


def test_images_are_pinned() -> None:
    """Every image has an exact version; ours has the version of the product, in the labels, too."""
    bases = [line.split()[1] for line in read("Dockerfile").splitlines() if line.startswith("FROM ")]
    others = [described["image"] for described in services().values() if "build" not in described]
    assert bases
    assert others
    for image in bases + others:
        assert re.fullmatch(r"[a-z/]+:\d+\.\d+(\.\d+)?-[\w.-]+", image), image
    for container in CONTAINERS:
        assert container.image.rsplit("/", 1)[-1] == f"parallel-planner:{__version__}"
    assert f'image.version="{__version__}"' in read("Dockerfile")
    assert f"-t parallel-planner:{__version__} " in read("Dockerfile")


def test_image_has_no_rights_and_no_secret() -> None:
    """The last stage ends as a user by number, who is not root, and no variable holds a password."""
    last = read("Dockerfile").rpartition("\nFROM ")[2]
    users = re.findall(r"^USER (.*)$", last, re.MULTILINE)
    assert re.fullmatch(r"[1-9]\d{3,}:[1-9]\d{3,}", users[-1])
    assert last.index("\nUSER ") < last.index("\nENTRYPOINT ")
    for text in (read("Dockerfile"), read("env.example")):
        assert not re.search(r"(PASSWORD|SECRET|TOKEN)\w*=[^\s\\]", text)
    assert not of_kind("Secret")
    for described in services().values():
        for name, value in described["environment"].items():
            assert "PASSWORD" not in name or value.startswith("${")


def test_image_copies_what_the_build_lets_in() -> None:
    """What the Dockerfile copies from the checkout is there and not kept out by the ignore file."""
    let_in = {line[1:] for line in read("Dockerfile.dockerignore").splitlines() if line.startswith("!")}
    copied = {
        source
        for line in read("Dockerfile").splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    }
    assert copied == let_in
    assert all((ROOT / source).exists() for source in copied)


def test_ports_agree() -> None:
    """Image, compose and Kubernetes name the port on which the service listens unless told otherwise."""
    assert f"\nEXPOSE {PORT}\n" in read("Dockerfile")
    assert f"'PLANNER_PORT', '{PORT}'" in read("Dockerfile")
    assert services()["api"]["ports"] == [f"127.0.0.1:{PORT}:{PORT}"]
    api, worker = (document["spec"]["template"]["spec"]["containers"][0] for document in of_kind("Deployment"))
    assert api["ports"] == [{"name": "http", "containerPort": PORT}]
    assert "ports" not in worker


def test_kubernetes_would_not_set_our_port() -> None:
    """A Service named `planner` makes Kubernetes set PLANNER_PORT to an address; our pods ask for none of that."""
    assert [document["metadata"]["name"] for document in of_kind("Service")] == ["planner"]
    for deployment in of_kind("Deployment"):
        assert deployment["spec"]["template"]["spec"]["enableServiceLinks"] is False


async def answers(settings: Settings, probes: list[dict[str, Any]]) -> list[int]:
    """The status that the service gives to each probe."""
    import httpx

    from planner_api.app import create_app

    app = create_app(settings)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://10.0.0.1") as client,
    ):
        asked = [
            client.get(probe["path"], headers={header["name"]: header["value"] for header in probe["httpHeaders"]})
            for probe in probes
        ]
        return [answer.status_code for answer in await asyncio.gather(*asked)]


def test_probes_are_answered(postgres_url: str) -> None:
    """The service as configured for Kubernetes answers each probe of the manifest, and of the image, with 200."""
    probes = [
        probe["httpGet"]
        for deployment in of_kind("Deployment")
        for name, probe in deployment["spec"]["template"]["spec"]["containers"][0].items()
        if name.endswith("Probe")
    ]
    assert {probe["path"] for probe in probes} == {"/healthz", "/readyz"}
    assert "/healthz', headers={'Host': 'localhost'}" in read("Dockerfile")
    hosts = [of_kind("ConfigMap")[0]["data"], services()["api"]["environment"], {"PLANNER_ALLOWED_HOSTS": "localhost"}]
    for names in (settings["PLANNER_ALLOWED_HOSTS"] for settings in hosts):
        settings = Settings(
            database_url=postgres_url,
            host="0.0.0.0",
            workers=0,
            allowed_hosts=re.sub(r"\$\{\w+:-(.*)\}", r"\1", names),
        )
        assert set(asyncio.run(answers(settings, probes))) == {200}


def test_pods_have_no_rights() -> None:
    """What Pod Security's profile `restricted` asks, and a file system that nobody writes to."""
    for deployment in of_kind("Deployment"):
        pod = deployment["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            context = container["securityContext"]
            assert context["runAsNonRoot"] is context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert set(container["resources"]) == {"requests", "limits"}


def test_compose_services_have_no_rights() -> None:
    """The same of every service of compose, the database included."""
    for described in services().values():
        assert described["read_only"] is True
        assert described["cap_drop"] == ["ALL"]
        assert described["security_opt"] == ["no-new-privileges:true"]
        assert {"mem_limit", "cpus", "pids_limit", "tmpfs"} <= set(described)


def test_selectors_find_their_pods() -> None:
    """Every Service, disruption budget and network policy selects pods that a Deployment here makes."""
    pods = [deployment["spec"]["template"]["metadata"]["labels"] for deployment in of_kind("Deployment")]
    selectors = [
        *(document["spec"]["selector"] for document in of_kind("Service")),
        *(document["spec"]["selector"]["matchLabels"] for document in of_kind("PodDisruptionBudget")),
        *(document["spec"]["podSelector"]["matchLabels"] for document in of_kind("NetworkPolicy")),
    ]
    assert len(selectors) == 5
    for selector in selectors:
        assert any(selector.items() <= labels.items() for labels in pods)
    assert {document["metadata"].get("namespace", "planner") for document in documents()} == {"planner"}
