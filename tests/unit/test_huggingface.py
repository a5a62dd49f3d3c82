"""Checkpoint configurations are read as their releases mean them, or refused with file, field and reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.catalog import load_model
from planner.catalog.huggingface import read_model_config
from planner.cost.params import active_params, total_params
from planner.errors import InputError

SAMPLES = Path(__file__).parents[1] / "data" / "hf"
EXPECTED: dict[str, dict[str, Any]] = yaml.safe_load((SAMPLES / "expected.yaml").read_text(encoding="utf-8"))
READABLE = sorted(name for name, facts in EXPECTED.items() if "error" not in facts)
REFUSED = sorted(name for name, facts in EXPECTED.items() if "error" in facts)
DIRECT = ("heads", "kv_heads", "head_dim", "ffn", "vocab", "tied", "attention", "gated_mlp", "max_seq")
LLAMA = json.loads((SAMPLES / "llama31_70b.json").read_text(encoding="utf-8"))


def write(folder: Path, text: str, name: str = "config.json") -> Path:
    """A configuration file with the given text."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_every_sample_has_expected_values() -> None:
    """No sample file lies about unchecked, and none is missing."""
    assert {path.stem for path in SAMPLES.glob("*.json")} == set(EXPECTED)


@pytest.mark.parametrize("name", READABLE)
def test_sample_is_read_as_released(name: str) -> None:
    """Parameter totals and the quirks named in expected.yaml come out of the file."""
    facts = EXPECTED[name]
    reading = read_model_config(SAMPLES / f"{name}.json")
    spec = reading.spec
    kinds = spec.layer_kinds()
    found: dict[str, Any] = {field: getattr(spec, field) for field in DIRECT}
    found |= {
        "params": total_params(spec),
        "qkv_bias": spec.bias.qkv,
        "window": None if spec.window is None else spec.window.global_every,
        "moe_layers": sum(mlp == "moe" for _, mlp in kinds),
        "full_attention_layers": sum(mixer == "attention" for mixer, _ in kinds),
    }
    assert {key: found[key] for key in facts if key in found} == {key: facts[key] for key in facts if key in found}
    if "params_b" in facts:
        assert total_params(spec) / 1e9 == pytest.approx(facts["params_b"], abs=0.0006)
    if "catalogue" in facts:
        assert total_params(spec) == total_params(load_model(facts["catalogue"]).spec)
    if "active_b" in facts:
        assert active_params(spec) / 1e9 == pytest.approx(facts["active_b"], rel=2e-3)
    assert facts.get("note", "") in " ".join(reading.notes)


@pytest.mark.parametrize("name", REFUSED)
def test_sample_is_refused_with_the_reason(name: str) -> None:
    """A refusal names the file and says why, in the words of expected.yaml."""
    with pytest.raises(InputError) as caught:
        read_model_config(SAMPLES / f"{name}.json")
    text = str(caught.value)
    assert name in text
    for word in EXPECTED[name]["error"]:
        assert str(word) in text


@pytest.mark.parametrize(
    ("sample", "catalogue"),
    [
        ("llama31_70b", "llama-3.1-70b"),
        ("qwen25_7b_hidden_bias", "qwen2.5-7b"),
        ("deepseek_v3_fp8", "deepseek-v3"),
        ("gpt_oss_120b_mxfp4", "gpt-oss-120b"),
        ("qwen3_next_80b", "qwen3-next-80b-a3b"),
        ("nemotron_h_8b", "nemotron-h-8b"),
        ("falcon_7b_multi_query", "falcon-7b"),
        ("gemma2_9b", "gemma-2-9b"),
        ("opt_350m_projection", "opt-350m"),
    ],
)
def test_reader_and_catalogue_agree(sample: str, catalogue: str) -> None:
    """The layers read from a configuration are those of the catalogue entry of the same model."""
    read, entry = read_model_config(SAMPLES / f"{sample}.json").spec, load_model(catalogue).spec
    assert total_params(read) == total_params(entry)
    assert read.layer_kinds() == entry.layer_kinds()


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "empty"),
        ("   \n", "empty"),
        ("{", "not JSON"),
        ("[1, 2]", "no JSON object"),
        ("null", "no JSON object"),
        ("\0\0", "not JSON"),
        ("[" * 200_000, "nested too deeply"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "cannot be read"),
        ("{}", "not a model configuration"),
        ('{"model_type": 7}', "model_type"),
        ('{"model_type": "llama", "hidden_size": NaN}', "hidden_size"),
        ('{"model_type": "llama", "text_config": {"model_type": []}}', "model_type"),
        ('{"weight_map": {}, "metadata": {}}', "weight index"),
        ('{"model_type": "llama", "quantization_config": "int4"}', "quantization_config"),
        ('{"dim": 4096, "n_layers": 32, "n_heads": 32, "moe": {"num_experts": 8}}', "experts"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_unusable_text_names_the_file(tmp_path: Path, text: str, word: str) -> None:
    """Broken, hostile or foreign JSON is an input error with file and reason, never a traceback."""
    path = write(tmp_path, text)
    with pytest.raises(InputError) as caught:
        read_model_config(path)
    assert "config.json" in str(caught.value)
    assert word in str(caught.value)


@pytest.mark.parametrize("value", ["8", [8], {}, True, -1, 0, 1.5, 10**12], ids=repr)
@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_wrong_value_names_the_field(tmp_path: Path, field: str, value: object) -> None:
    """Whatever stands where a dimension should is refused under the name of that field."""
    path = write(tmp_path, json.dumps({**LLAMA, field: value}))
    with pytest.raises(InputError, match=field):
        read_model_config(path)


def test_missing_file_folder_and_binary(tmp_path: Path) -> None:
    """A missing path, an empty folder, a name with a NUL and a binary file are all input errors."""
    (tmp_path / "weights.bin").write_bytes(b"\x80\x81\xff\xfe")
    for path in (tmp_path / "none.json", tmp_path, Path("a\0b"), tmp_path / "weights.bin"):
        with pytest.raises(InputError):
            read_model_config(path)


def test_folder_with_index_tells_the_stored_count(tmp_path: Path) -> None:
    """The weight index of a folder gives the stored parameters at the width of the stored type."""
    write(tmp_path, json.dumps(LLAMA))
    write(tmp_path, json.dumps({"metadata": {"total_size": 2 * 70553706496}}), "model.safetensors.index.json")
    assert read_model_config(tmp_path).published_params == 70553706496


def test_folder_names_the_model(tmp_path: Path) -> None:
    """Without a name of its own a configuration takes that of its folder."""
    folder = tmp_path / "My Llama"
    folder.mkdir()
    write(folder, json.dumps(LLAMA))
    assert read_model_config(folder).spec.name == "My-Llama"


def test_irregular_moe_placement_is_refused(tmp_path: Path) -> None:
    """Expert layers that follow no rule are not rounded to one."""
    config = json.loads((SAMPLES / "qwen3_30b_a3b_moe.json").read_text(encoding="utf-8"))
    path = write(tmp_path, json.dumps({**config, "mlp_only_layers": [0, 7, 9]}))
    with pytest.raises(InputError, match="irregularly"):
        read_model_config(path)


def test_leading_dense_layers_from_a_list(tmp_path: Path) -> None:
    """mlp_only_layers 0 and 1 mean two leading dense layers."""
    config = json.loads((SAMPLES / "qwen3_30b_a3b_moe.json").read_text(encoding="utf-8"))
    path = write(tmp_path, json.dumps({**config, "mlp_only_layers": [0, 1]}))
    kinds = read_model_config(path).spec.layer_kinds()
    assert [mlp for _, mlp in kinds] == ["dense"] * 2 + ["moe"] * 46


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_no_mutation_escapes_as_a_traceback(tmp_path: Path, name: str) -> None:
    """Each field of each sample, replaced by things it should not hold, gives a reading or an input error."""
    config = json.loads((SAMPLES / f"{name}.json").read_text(encoding="utf-8"))
    odd: list[object] = [None, "x", -1, 0, 1.5, 10**9, True, [], [None], {}, {"a": None}, [{}], float("nan")]
    outer = [("", key) for key in config]
    inner = [(tower, key) for tower, value in config.items() if isinstance(value, dict) for key in value]
    for tower, key in outer + inner:
        for value in odd:
            changed = {**config, tower: {**config[tower], key: value}} if tower else {**config, key: value}
            path = write(tmp_path, json.dumps(changed))
            try:
                where = f"{path}: {total_params(read_model_config(path).spec)}"
            except InputError as error:
                where = error.where or ""
            assert where.startswith(str(path))
            assert not where.endswith(": 0")
