"""Options from flags, the environment and a file, and what is said of wrong ones."""

from __future__ import annotations

import typing

import psutil
import pytest

from kvstore.eviction import DEFAULT_POLICY, POLICIES
from services.common import config, option_values
from services.common.config import ConfigError


@pytest.fixture(autouse=True)
def no_other_sources(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in config.known_options():
        monkeypatch.delenv(f"QUIRE_{name.upper()}", raising=False)


def load(*arguments: str) -> config.UpSettings:
    return config.load(config.UpSettings, "up", list(arguments))


def refusal(*arguments: str) -> str:
    with pytest.raises(ConfigError) as raised:
        load(*arguments)
    return str(raised.value)


def test_flags_go_before_the_environment_and_that_before_the_file(monkeypatch, tmp_path):
    (tmp_path / "quire.toml").write_text('block-size = 8\nthreads = 3\nmodel = "m"')
    monkeypatch.setenv("QUIRE_BLOCK_SIZE", "16")
    monkeypatch.setenv("QUIRE_THREADS", "4")
    settings = load("--block-size", "32")
    assert (settings.block_size, settings.threads, settings.model) == (32, 4, "m")


def test_a_file_may_be_named(monkeypatch, tmp_path):
    (tmp_path / "other.toml").write_text("threads = 5")
    monkeypatch.setenv("QUIRE_CONFIG", str(tmp_path / "other.toml"))
    assert load().threads == 5


def test_what_config_prints_gives_the_same_settings(tmp_path):
    settings = load("--block-size", "8", "--kv-memory", "64MiB", "--step-timeout", "2.5")
    (tmp_path / "quire.toml").write_text(config.to_toml(settings))
    assert load() == settings


def test_every_eviction_policy_can_be_chosen():
    choices = typing.get_args(config.PoolSettings.model_fields["eviction"].annotation)
    assert list(choices) == sorted(POLICIES)
    assert load().eviction == DEFAULT_POLICY


def test_limits_of_tenants():
    assert option_values.tenant_limits("") == {}
    text = "acme=100:400, beta=5,free=:50,none=:"
    assert option_values.tenant_limits(text) == {
        "acme": (100, 400),
        "beta": (5, None),
        "free": (0, 50),
        "none": (0, None),
    }
    assert load("--tenants", text).tenants == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("acme", "NAME=FLOOR"),
        ("=3", "NAME=FLOOR"),
        ("a=3:2", "below the floor"),
        ("a=:0", "or 0"),
        ("a=1,a=2", "twice"),
        ("a=-1", "NAME=FLOOR"),
    ],
)
def test_limits_that_make_no_sense_are_refused(text, words):
    assert words in refusal("--tenants", text)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1048576", 2**20), ("1MiB", 2**20), ("2 MB", 2 * 10**6), ("0.5gib", 2**29)],
)
def test_sizes(text, size):
    assert option_values.memory_bytes(text) == size


def test_a_share_is_of_all_the_memory():
    assert option_values.memory_bytes("25%") == psutil.virtual_memory().total // 4


def test_a_size_in_a_file_may_be_a_number(tmp_path):
    (tmp_path / "quire.toml").write_text("kv_memory = 1000000")
    assert load().kv_memory == "1000000"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kv-memory", "lots"], ["--kv-memory", "'lots'"]),
        (["--kv-memory", "200%"], ["--kv-memory", "more than all"]),
        (["--kv-memory=0"], ["--kv-memory", "above zero"]),
        (["--block-size=9"], ["--block-size", "8, 16 or 32", "9"]),
        (["--http", "9999"], ["--http", "HOST:PORT"]),
        (["--http", "h:70000"], ["--http", "HOST:PORT"]),
        (["--threads", "-1"], ["--threads", "-1"]),
        (["--http=h:1", "--grpc=h:1"], ["--http", "--grpc", "h:1"]),
    ],
)
def test_a_wrong_flag_is_named(arguments, words):
    text = refusal(*arguments)
    assert all(word in text for word in words), text
    assert "\n" not in text


def test_a_wrong_value_is_said_once():
    assert refusal("--http", "9999").count("9999") == 1


def test_a_wrong_variable_is_named(monkeypatch):
    monkeypatch.setenv("QUIRE_THREADS", "two")
    assert refusal().startswith("QUIRE_THREADS: ")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("block_size = 9", ["block_size in quire.toml"]),
        ("threads = true", ["threads"]),
        ("[threads]\nx = 1", ["threads"]),
        ("thread = 1", ["'thread'"]),
        ("threads = ", ["quire.toml"]),
    ],
)
def test_a_wrong_file_is_named(tmp_path, content, words):
    (tmp_path / "quire.toml").write_text(content)
    text = refusal()
    assert all(word in text for word in words), text
    assert "quire.toml" in text


def test_a_file_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("QUIRE_CONFIG", "nowhere.toml")
    assert "nowhere.toml" in refusal()


def test_a_variable_that_is_no_option_is_doubtful(monkeypatch):
    monkeypatch.setenv("QUIRE_THREAD", "2")
    monkeypatch.setenv("QUIRE_PORT", "tcp://10.0.0.1:80")  # as Kubernetes does
    monkeypatch.setenv("QUIRE_THREADS", "2")
    thread = [text for text in config.doubtful_variables() if "QUIRE_THREAD " in text]
    assert len(thread) == 1
    assert "QUIRE_THREADS?" in thread[0]
    assert not [text for text in config.doubtful_variables() if text.startswith("QUIRE_THREADS ")]
    assert load().threads == 2


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "nowhere", ":50051", "unix:", "host:x"])
def test_an_address_that_is_none_is_refused_before_anything_listens(address):
    with pytest.raises(ConfigError, match="--listen"):
        config.load(config.KvStoreSettings, "serve-kvstore", [f"--listen={address}"])


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:50051", "unix:/tmp/kv.sock"])
def test_addresses_of_both_kinds_are_taken(address):
    settings = config.load(config.KvStoreSettings, "serve-kvstore", [f"--listen={address}"])
    assert settings.listen == address


def test_guesses_of_a_draft_model_need_one():
    assert "needs a --draft-model" in refusal("--speculation", "draft")
    assert load("--speculation", "draft", "--draft-model", "m").draft_model == "m"


@pytest.mark.parametrize(
    ("text", "number"), [("cpu", None), ("cuda", 0), ("cuda:0", 0), ("cuda:12", 12)]
)
def test_devices(text, number):
    assert option_values.device_number(text) == number
    assert load("--device", text).device == text


@pytest.mark.parametrize("text", ["gpu", "cuda:", "cuda:x", "cuda:-1", "CUDA", "cuda:99999", ""])
def test_a_device_that_is_none_is_refused(text):
    assert "is not cpu, cuda or cuda:N" in refusal(f"--device={text}")


def test_a_device_and_the_type_of_kv_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("QUIRE_DEVICE", "cuda:1")
    monkeypatch.setenv("QUIRE_KV_DTYPE", "int8")
    assert (load().device, load().kv_dtype) == ("cuda:1", "int8")
    monkeypatch.setenv("QUIRE_KV_DTYPE", "int4")
    assert refusal().startswith("QUIRE_KV_DTYPE")


@pytest.mark.parametrize(("text", "share"), [("90%", 0.9), ("100%", 1.0), ("1GiB", 0.0)])
def test_what_of_a_size_is_a_share(text, share):
    assert option_values.memory_share(text) == share
