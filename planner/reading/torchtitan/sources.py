"""Where a torchtitan configuration is written: command lines, shell scripts, registry modules and TOML files.

Gathers settings with the place of each, later ones over earlier ones; what they mean is decided elsewhere."""

from __future__ import annotations

import ast
import posixpath
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from planner.errors import InputError
from planner.reading.configuration import Files
from planner.reading.texts.python_module import literal, literals, parse_python
from planner.reading.texts.shell import Launch, Word, entry_scripts, launches, read_script
from planner.reading.torchtitan.fields import FIELDS, STOCK, Era
from planner.specs.finding import Finding

_SUBCOMMAND = re.compile(r"([a-z][a-z-]*):([a-z][a-z-]*)")
_FLAG = re.compile(r"--[A-Za-z]")
_SWITCH_WORDS = ("true", "false", "True", "False")
_MOST_TOML_BYTES = 4_000_000
"""A configuration is some kilobytes; deeply nested or endless files are not read."""


@dataclass(frozen=True)
class Setting:
    """One value and where it stands."""

    value: Any
    where: str
    unknown: tuple[str, ...] = ()
    """Variables without a value that it depends on."""


@dataclass
class Gathered:
    """Everything that the files set, before it is interpreted."""

    era: Era
    settings: dict[str, Setting] = field(default_factory=dict)
    """``section.field`` -> the value that holds in the end."""
    module: str | None = None
    config: str | None = None
    base_known: bool = True
    """Whether the registry function or TOML file below the flags was read; else their values are anyone's guess."""
    flavor: str | None = None
    recompute: str | None = None
    """Chosen by a subcommand or a registry function."""
    fp8: bool = False
    graphs_with_experts: bool = False
    plan: dict[str, Any] = field(default_factory=dict)
    """Constants of a registry module that the planner wrote."""
    task: str | None = None
    gpus: int | None = None
    gpus_per_node: int | None = None
    findings: list[Finding] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)


def looks_like_toml(name: str, text: str) -> bool:
    """A TOML file of torchtitan 0.1 or 0.2 (or older), by its tables and degrees."""
    tables = re.search(r"^\s*\[(parallelism|experimental|activation_checkpoint|training|model)\]", text, re.M)
    marks = re.search(r"^\s*(flavor|\w+_parallel_degree|data_parallel_\w+_degree|local_batch_size)\s*=", text, re.M)
    return bool(tables and marks and (name.endswith(".toml") or "--" not in text))


def looks_like_command(text: str) -> bool:
    """A command line of 0.3, of 0.1 and 0.2, or of run_train.sh."""
    registry = re.search(r"--module\b", text) and re.search(r"--config\b", text)
    named = re.search(r"torchtitan|run_train\.sh", text) or re.search(r"--(parallelism|training)\.[a-z]", text)
    return bool(
        (registry or re.search(r"--job\.config[_-]file|CONFIG_FILE=|--(parallelism|training)\.[a-z]", text)) and named
    )


def gather(files: Files) -> Gathered:
    """All settings of ``files``."""
    tomls = {name: text for name, text in files.items() if looks_like_toml(name, text)}
    scripts = {
        name: text
        for name, text in files.items()
        if name not in tomls and not name.endswith((".py", ".toml", ".sbatch")) and "\x00" not in text
    }
    jobs = {name: text for name, text in files.items() if name.endswith(".sbatch")}
    command = _command({**scripts, **jobs})
    if command is None:
        if not tomls:
            raise InputError(
                "no torchtitan command is found",
                where=", ".join(sorted(files)),
                allowed="a command line with --module and --config, or a TOML file of 0.1 or 0.2",
                hint="name the script that starts torchtitan",
            )
        name = next(iter(tomls))
        return _with_toml(Gathered("toml"), name, tomls[name])
    return _with_command(command, files, tomls)


# --- The command


@dataclass(frozen=True)
class _Command:
    """Words after the training module, and what was around them."""

    words: list[Word]
    environment: Mapping[str, str] = field(default_factory=dict)
    gpus: int | None = None
    per_node: int | None = None


_MARKS = re.compile(r"--(module|config|job\.config|parallelism\.|training\.)")


def _command(files: Mapping[str, str]) -> _Command | None:
    """The first command of the scripts that trains."""
    kept = {name: text for name, text in files.items() if text.strip()}
    for name in entry_scripts(kept) if kept else ():
        script = read_script(kept, name)
        for launch in launches(script):
            if _is_training(launch):
                return _Command(list(launch.arguments), launch.environment, launch.gpus, launch.per_node)
        for command in script.commands:
            words = list(command.words)
            wrapper = any(posixpath.basename(word.text) == "run_train.sh" for word in words)
            if wrapper or any(_MARKS.match(word.text) for word in words):
                # run_train.sh takes the module, the function and the GPUs of its one node from the environment.
                count = command.environment.get("NGPU", "8") if wrapper else ""
                gpus = int(count) if re.fullmatch(r"[0-9]{1,6}", count) else None
                return _Command(words, command.environment, gpus, gpus)
        for array in script.arrays.values():
            if any(_MARKS.match(word.text) for word in array):
                return _Command(list(array))
    return None


def _is_training(launch: Launch) -> bool:
    script = launch.script.text if launch.script else ""
    return any(_MARKS.match(word.text) for word in launch.arguments) or "torchtitan" in script


def _with_command(command: _Command, files: Files, tomls: Mapping[str, str]) -> Gathered:
    flags, subcommands = _flags(command.words)
    toml = flags.pop("job.config_file", None)
    environment = command.environment
    era: Era = "toml" if toml or (tomls and "module" not in flags) or "CONFIG_FILE" in environment else "registry"
    gathered = Gathered(era, gpus=command.gpus, gpus_per_node=command.per_node)
    if era == "toml":
        _with_named_toml(gathered, toml.value if toml else environment.get("CONFIG_FILE"), tomls)
    else:
        _with_registry(gathered, flags, environment, files)
    for name in ("module", "config"):
        flags.pop(name, None)
    gathered.settings |= flags
    for kind, choice in subcommands:
        if kind == "activation-checkpoint":
            gathered.recompute = choice
    return gathered


def _flags(words: list[Word]) -> tuple[dict[str, Setting], list[tuple[str, str]]]:
    """Flags by ``section.field`` (hyphens and underscores mean the same), and subcommands."""
    known = {**FIELDS["toml"], **FIELDS["registry"]}
    flags: dict[str, Setting] = {}
    subcommands = []
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        found = _SUBCOMMAND.fullmatch(word.text)
        if found:
            subcommands.append((found[1], found[2]))
        if not _FLAG.match(word.text):
            continue
        name, equals, text = word.text[2:].partition("=")
        name = name.replace("-", "_")
        section, _, key = name.rpartition(".")
        unknown = word.unset
        if key.startswith("no_") and f"{section}.{key[3:]}" in known:
            flags[f"{section}.{key[3:]}"] = Setting(False, word.where)
            continue
        value: Any = text if equals else True
        following = words[index] if index < len(words) else None
        switch = name in known and known[name].kind == "switch"
        if not equals and following is not None and _takes(following, switch):
            value, unknown = following.text, following.unset
            index += 1
        flags[name] = Setting(value, word.where, unknown)
    return flags, subcommands


def _takes(word: Word, switch: bool) -> bool:
    """Whether ``word`` is the value of the flag before it."""
    if switch:
        return word.text in _SWITCH_WORDS
    return not _FLAG.match(word.text) and not _SUBCOMMAND.fullmatch(word.text)


# --- Registry modules


def _with_registry(
    gathered: Gathered, flags: Mapping[str, Setting], environment: Mapping[str, str], files: Files
) -> None:
    """The module and function of 0.3, from the flags or from the variables of run_train.sh."""
    for name in ("module", "config"):
        setting = flags.get(name)
        text = str(setting.value) if setting is not None and not setting.unknown else environment.get(name.upper())
        setattr(gathered, name, text)
    module, config = gathered.module, gathered.config
    gathered.base_known = False
    if module is None or config is None:
        missing = "--module" if module is None else "--config"
        gathered.findings.append(
            Finding(
                id="registry-missing",
                severity="error",
                message=f"{missing} is not given: torchtitan 0.3 starts from a configuration function",
                where=missing,
                allowed="--module llama3 --config llama3_8b, for example",
                hint="add both, or name the TOML file that versions 0.1 and 0.2 read",
            )
        )
        return
    short = module.removeprefix("torchtitan.models.").removesuffix(".config_registry")
    source = _python_file(module, files)
    gathered.base_known = source is not None or (short, config) in STOCK
    if source is not None:
        _with_python(gathered, source, files[source], config)
    elif (short, config) in STOCK:
        _with_stock(gathered, short, config)
    else:
        gathered.unread.append(f"--config {config}: what this function of {module} sets is not known")


def _with_stock(gathered: Gathered, module: str, config: str) -> None:
    stock = STOCK[module, config]
    gathered.module, gathered.flavor, gathered.recompute = module, stock.flavor, stock.recompute
    gathered.fp8, gathered.graphs_with_experts = stock.fp8, stock.graphs_with_experts
    gathered.task = "sft" if config.startswith("sft_") else None
    for name, value in stock.settings.items():
        gathered.settings[name] = Setting(value, f"--config {config}")


def _python_file(module: str, files: Files) -> str | None:
    path = module.replace(".", "/")
    wanted = (f"{path}.py", f"{path}/config_registry.py", "config_registry.py", f"{module.rpartition('.')[2]}.py")
    names = [name for name in files if name.endswith(".py")]
    for ending in wanted:
        for name in names:
            if name == ending or posixpath.basename(name) == posixpath.basename(ending):
                return name
    return None


def _with_python(gathered: Gathered, name: str, text: str, config: str) -> None:
    """Literals of a registry module; nothing is run."""
    tree = parse_python(name, text)
    constants = literals(tree)
    if {"MODEL", "RECOMPUTE", "LAYERS_PER_STAGE"} <= set(constants):
        gathered.plan = constants
        # The function switches the compiler on.
        gathered.settings["compile.enable"] = Setting(True, name)
        return
    function = next((n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == config), None)
    if function is None:
        gathered.base_known = False
        gathered.findings.append(
            Finding(
                id="config-function",
                severity="error",
                message=f"{name} has no function {config}",
                where="--config",
                allowed=", ".join(n.name for n in tree.body if isinstance(n, ast.FunctionDef))[:200],
            )
        )
        return
    _with_function(gathered, name, function)


_SECTION_CLASSES = {"TrainingConfig": "training", "ParallelismConfig": "parallelism", "CompileConfig": "compile"}


def _with_function(gathered: Gathered, name: str, function: ast.FunctionDef) -> None:
    """Keywords of the section classes, assignments to ``config.section.field``, and the flavor."""
    for node in ast.walk(function):
        where = f"{name}:{getattr(node, 'lineno', function.lineno)}"
        if isinstance(node, ast.Call):
            _with_call(gathered, node, where)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            path, value = ast.unparse(node.targets[0]), literal(node.value)
            found = re.fullmatch(r"\w+\.((?:training|parallelism|compile)\.\w+)", path)
            if found and value is not None:
                gathered.settings[found[1]] = Setting(value[0], where)


def _with_call(gathered: Gathered, call: ast.Call, where: str) -> None:
    called = ast.unparse(call.func)
    section = _SECTION_CLASSES.get(called.rpartition(".")[2])
    if section is not None:
        for keyword in call.keywords:
            value = literal(keyword.value)
            key = f"{section}.{keyword.arg}"
            if value is None:
                gathered.unread.append(f"{key} ({where}): not a literal")
            elif value[0] is not None:
                gathered.settings[key] = Setting(value[0], where)
    elif called in ("FullAC.Config", "SelectiveAC.Config", "MemoryBudgetAC.Config"):
        names = {"FullAC": "full", "SelectiveAC": "selective", "MemoryBudgetAC": "memory-budget"}
        gathered.recompute = names[called.partition(".")[0]]
    elif called.endswith("model_registry") and call.args:
        flavor = literal(call.args[0])
        gathered.flavor = str(flavor[0]) if flavor else None
    elif called.endswith(("Float8LinearConverter.Config", "MXFP8LinearConverter.Config")):
        gathered.fp8 = True
    else:
        stock = next((key for key in STOCK if key[1] == called), None)
        if stock is not None:
            _with_stock(gathered, *stock)


# --- TOML


def _with_named_toml(gathered: Gathered, path: Any, tomls: Mapping[str, str]) -> None:
    wanted = posixpath.basename(str(path or ""))
    name = next((name for name in tomls if posixpath.basename(name) == wanted), None)
    if name is None and len(tomls) == 1 and not wanted:
        name = next(iter(tomls))
    if name is None:
        gathered.base_known = False
        gathered.unread.append(f"--job.config_file {path}: the file is not among those given")
        return
    _with_toml(gathered, name, tomls[name])


def _with_toml(gathered: Gathered, name: str, text: str) -> Gathered:
    try:
        if len(text) > _MOST_TOML_BYTES:
            raise ValueError(f"{len(text)} characters")
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as problem:
        raise InputError(
            "the TOML file cannot be read",
            where=name,
            got=str(problem)[:120],
            allowed="TOML tables of key = value",
            hint="correct the line named",
        ) from problem
    gathered.settings |= dict(_leaves(document, "", name))
    return gathered


def _leaves(table: Mapping[str, Any], prefix: str, name: str) -> Iterator[tuple[str, Setting]]:
    """Values by their dotted path, tables inside ``quantize`` followed."""
    for key, value in table.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and path.count(".") < 6:
            yield path, Setting(True, f"{name}: [{path}]")
            yield from _leaves(value, f"{path}.", name)
        else:
            yield path, Setting(value, f"{name}: {path}")
