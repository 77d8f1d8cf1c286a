"""Each preflight rule on a configuration that breaks it: the line names value, rule and a valid choice."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config, parse_config
from asyncrl.launch import preflight as preflight_module
from asyncrl.launch.preflight import preflight
from tests.free_pair import free_pair

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 30,
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def write_model(directory: Path, largest_token: int = 99, **changes: Any) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**SMOLLM2, **changes}))
    (directory / "model.safetensors").write_bytes(b"")
    tokenizer = {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": largest_token}]}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return directory


def configure(model: Path, /, **sections: Any) -> Config:
    """A configuration that passes, with changes by section."""
    tree: dict[str, Any] = {
        "runs_dir": str(model.parent / "runs"),
        "model": {"path": str(model)},
        "data": {"path": str(write_rows(model.parent / "rows.jsonl"))},
        "rollout": {"max_prompt_tokens": 100, "max_new_tokens": 100},
        "train": {"microbatch_tokens": 256},
        "ring": {"directory": str(model.parent)},
    }
    for section, values in sections.items():
        tree[section] = {**tree.get(section, {}), **values} if isinstance(values, dict) else values
    return parse_config(tree)


def write_rows(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines or ('{"prompt": "1 + 1 = ?", "answer": "2"}',)) + "\n")
    return path


def only_problem(config: Config) -> str:
    problems = preflight(config)
    assert len(problems) == 1, problems
    assert "\n" not in problems[0]
    return problems[0]


def test_a_sound_configuration_has_no_problem(model: Path) -> None:
    assert preflight(configure(model)) == []


def test_no_model_directory(model: Path) -> None:
    assert "no such directory" in only_problem(configure(model, model={"path": str(model / "gone")}))


def test_unknown_architecture(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", architectures=["MambaForCausalLM"])
    assert "MambaForCausalLM is not supported" in only_problem(configure(model))


def test_weights_missing(model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert "no *.safetensors; download the weights" in only_problem(configure(model))
    (model / "pytorch_model.bin").write_bytes(b"")
    assert "convert them to safetensors" in only_problem(configure(model))
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-1.safetensors is missing (2 of 2)" in only_problem(configure(model))


def test_tokenizer_of_another_model(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", largest_token=60000)
    assert "token id 60000, the model's vocab_size is 49152" in only_problem(configure(model))
    (model / "tokenizer.json").unlink()
    assert "no tokenizer.json" in only_problem(configure(model))


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"parallel": {"tp": 2}}, "parallel.tp = 2 cannot cut 9 attention heads, 3 key/value heads"),
        ({"parallel": {"tp": 2}}, "nearest: parallel.tp = 1"),
        ({"parallel": {"tp": 4}}, "nearest: parallel.tp = 3"),
        ({"engine": {"tp": 2}}, "key/value heads must be a multiple of tp on a CPU; nearest: engine.tp = 1"),
        ({"parallel": {"pp": 4}}, "pp = 4 x vpp = 1 does not divide the model's 30 layers"),
        ({"parallel": {"pp": 4}}, "nearest: parallel.pp = 3"),
        ({"parallel": {"pp": 4, "vpp": 3}}, "nearest: parallel.pp = 5"),
        ({"parallel": {"pp": 2, "vpp": 4}}, "nearest: parallel.vpp = 1 and pp = 2"),
        ({"engine": {"context_length": 9000}}, "set it to 8192 or less"),
        ({"train": {"microbatch_tokens": 199}}, "set it to 200 or more"),
        ({"parallel": {"cp": 3}, "train": {"microbatch_tokens": 200}}, "204 padded; set it to 204 or more"),
    ],
)
def test_the_model_does_not_fit(model: Path, sections: dict[str, Any], text: str) -> None:
    assert text in only_problem(configure(model, **sections))


def test_valid_layouts_pass(model: Path) -> None:
    for sections in (
        {"parallel": {"tp": 3, "sequence_parallel": True}},
        {"parallel": {"pp": 5, "vpp": 3}},
        {"engine": {"tp": 3}},
    ):
        assert preflight(configure(model, **sections)) == []


def test_rollouts_longer_than_the_model(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", max_position_embeddings=128)
    problems = preflight(configure(model, engine={"context_length": 200}))
    assert any("= 200 exceeds the model's max_position_embeddings = 128" in problem for problem in problems)


def test_too_little_memory(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_module, "_machine_memory", lambda: 2 << 30)
    assert "this machine has 2.0 GiB" in only_problem(configure(model, parallel={"dp": 2}))


def test_prompts(model: Path) -> None:
    missing = configure(model, data={"path": str(model / "none.jsonl")})
    assert "data.path" in only_problem(missing) and "none.jsonl" in only_problem(missing)
    broken = write_rows(model / "broken.jsonl", '{"prompt": "a", "answer": 1}', '{"prompt"')
    assert "broken.jsonl:2" in only_problem(configure(model, data={"path": str(broken)}))
    unknown = {"path": None, "reasoning_gym": "basic_arithmetik"}
    assert "nearest: basic_arithmetic" in only_problem(configure(model, data=unknown))


def test_reward(model: Path) -> None:
    assert "FILE.py:FUNCTION" in only_problem(configure(model, reward={"function": "lastnumber"}))
    missing = only_problem(configure(model, reward={"function": f"{model}/none.py:score"}))
    assert "none.py" in missing


def test_ports_in_use(model: Path) -> None:
    with socket.socket() as taken:
        port = free_pair() + 1
        taken.bind(("127.0.0.1", port))
        taken.listen()
        problem = only_problem(configure(model, control={"port": port}))
        assert (
            problem
            == f"control.port: port {port} is in use on 127.0.0.1; choose another, or 0 for any free one"
        )
        assert f"engine.port: port {port} is in use" in only_problem(
            configure(model, engine={"port": port - 1, "replicas": 2})
        )


def test_ring(model: Path) -> None:
    assert "use /dev/shm" in only_problem(configure(model, ring={"directory": str(model / "gone")}))
    too_large = only_problem(configure(model, ring={"arena_mib": 1e9}))
    assert "mount -o remount,size=" in too_large and "(in Docker: --shm-size=" in too_large
    assert "set it to 1 or more" in only_problem(configure(model, ring={"arena_mib": 0.1}))
    assert "set it to 128 or more" in only_problem(configure(model, ring={"num_slots": 8}))


def test_run_name(model: Path) -> None:
    assert "is not a folder name" in only_problem(configure(model, name="a/b"))
    (model.parent / "runs" / "run").mkdir(parents=True)
    assert "exists and is not overwritten; choose another name" in only_problem(configure(model))
    assert preflight(configure(model, checkpoint={"resume": "auto"})) == []
    assert "no such directory" in only_problem(configure(model, checkpoint={"resume": "gone"}))


def test_all_problems_come_at_once(model: Path) -> None:
    config = configure(model, name="?", parallel={"tp": 2}, reward={"function": "x"}, ring={"num_slots": 1})
    assert len(preflight(config)) == 4


def test_models_that_the_trainer_cannot_build(tmp_path: Path) -> None:
    experts = {"num_experts": 8, "moe_intermediate_size": 64}
    model = write_model(tmp_path / "model", architectures=["Qwen3MoeForCausalLM"], **experts)
    [problem] = [line for line in preflight(configure(model)) if "model.path" in line]
    assert "qwen3_moe has mixture-of-experts layers, which the trainer cannot build yet" in problem
