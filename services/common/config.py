"""Configuration: flags over QUIRE_* environment over a TOML file.

Every option is declared once, below, with its default, range and text; a command's
settings are the groups that it needs.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from services.common.option_values import (
    BlockSize,
    Device,
    HostMemorySize,
    HostPort,
    ListenAddress,
    MemorySize,
    Tenants,
)
from services.common.startup import StartupError

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_KVSTORE = "127.0.0.1:50051"

_PREFIX = "QUIRE_"
_CONFIG_FILE = "QUIRE_CONFIG"


class ConfigError(StartupError):
    """An option, a variable or the configuration file is wrong."""


def _default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "quire"


class _Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix=_PREFIX,
        extra="ignore",  # the environment and the TOML file are shared by all commands
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        # A field cannot be named like a method of its class.
        cli_shortcuts={"as-json": "json"},
        protected_namespaces=(),
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - fixed signature
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, _TomlSource(settings_cls)


class _TomlSource(PydanticBaseSettingsSource):
    """The file named by QUIRE_CONFIG, or ./quire.toml if it exists."""

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:  # noqa: ARG002
        return None, field_name, False  # all fields come from __call__

    def __call__(self) -> dict[str, Any]:
        path = _config_file()
        if path is None:
            return {}
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:  # not TOML, or not UTF-8
            raise ConfigError(f"configuration file {path}: {error}") from None
        names = {key.replace("-", "_"): value for key, value in values.items()}
        for name, value in names.items():
            if name not in known_options():
                raise ConfigError(f"configuration file {path}: unknown option {name!r}")
            if type(value) not in (str, int, float):
                raise ConfigError(f"configuration file {path}: {name} must be a string or a number")
        return {key: value for key, value in names.items() if key in self.settings_cls.model_fields}


def _config_file() -> Path | None:
    """The file named by QUIRE_CONFIG, or ./quire.toml if it exists."""
    named = os.environ.get(_CONFIG_FILE)
    path = Path(named) if named else Path("quire.toml")
    return path if named or path.exists() else None


class LogSettings(_Settings):
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe log lines to print"
    )
    log_format: Literal["text", "json"] = Field("text", description="form of log lines")


class ModelSettings(_Settings):
    model: str = Field(
        DEFAULT_MODEL,
        min_length=1,
        description="the built-in model's name, a GGUF file, a directory of safetensors, "
        "or a hub id",
    )
    cache_dir: Path = Field(_default_cache_dir(), description="where models and kernels are kept")


class DeviceSettings(_Settings):
    device: Device = Field(
        "cpu", description="where the pool is and what computes on it: cpu, cuda or cuda:N"
    )


class PoolSettings(DeviceSettings):
    kv_memory: MemorySize = Field(
        "1GiB",
        description="size of the page pool: bytes, 1GiB, 500MB, or 25% of memory; on a CUDA "
        "device, of what is free there when the pool is made",
    )
    block_size: BlockSize = Field(16, description="tokens per block: 8, 16 or 32")
    host_memory: HostMemorySize = Field(
        "0", description="size of the host pool that blocks are swapped to; 0: none"
    )
    tenants: Tenants = Field(
        "", description="blocks that tenants are sure of and may have: NAME=FLOOR:QUOTA,…"
    )
    eviction: Literal["gdsf", "lhd", "lru", "s3-fifo"] = Field(
        "lhd", description="which cached blocks go first when room is needed"
    )
    pin_share: float = Field(0.5, ge=0, le=1, description="share of the pool that pins may hold")
    tenant_pin_share: float = Field(
        0.5, ge=0, le=1, description="share of the pool that one tenant's pins may hold"
    )
    audit_after: float = Field(
        30.0, ge=0, description="idle seconds after which the pool is audited; 0: never"
    )


class MathSettings(DeviceSettings):
    dtype: Literal["float32", "float16", "bfloat16"] = Field(
        "float32", description="type of weights, activations and KV"
    )
    kv_dtype: Literal["auto", "float16", "bfloat16", "fp8_e4m3", "int8"] = Field(
        "auto", description="type of KV; auto: as --dtype"
    )
    quantization: Literal["none", "int8"] = Field(
        "none", description="int8: keep the weights of products in 8 bits, with a scale per output"
    )
    threads: int = Field(
        0, ge=0, le=1024, description="threads for arithmetic; 0: one per available core"
    )


class ApiSettings(_Settings):
    http: HostPort = Field("127.0.0.1:8000", description="address of the REST interface")
    grpc: HostPort = Field("127.0.0.1:50050", description="address of GenerationService")
    max_waiting: int = Field(256, ge=1, description="requests that may wait before 429")
    max_running: int = Field(64, ge=1, le=4096, description="sequences in a step at most")
    token_budget: int = Field(512, ge=1, le=65536, description="tokens in a step at most")
    step_target: float = Field(
        0.25,
        ge=0,
        description="seconds that prompts may make a step take while others decode; 0: no bound",
    )
    ageing: float = Field(
        10.0, gt=0, description="seconds of waiting that make up for a class of priority"
    )
    watermark: float = Field(
        0.01,
        ge=0,
        lt=1,
        description="share of the pool that stays available when a request is admitted",
    )
    speculation: Literal["off", "ngram", "draft"] = Field(
        "off",
        description="guess next tokens: from the text so far (ngram) or with compute's draft model",
    )
    num_drafts: int = Field(4, ge=1, le=32, description="guesses for a sequence in a step")
    step_timeout: float = Field(
        60.0, gt=0, description="seconds after which a step counts as stalled"
    )
    queue_timeout: float = Field(
        30.0, ge=0, description="seconds that requests outlast a lost worker"
    )
    max_body_bytes: int = Field(4 * 2**20, ge=1024, description="largest HTTP request body")
    drain_timeout: float = Field(
        5.0, ge=0, description="seconds that running requests get at shutdown"
    )

    @model_validator(mode="after")
    def _two_addresses(self) -> Self:
        if self.http == self.grpc and not self.http.endswith(":0"):
            raise ValueError(f"--http and --grpc are both {self.http}: they need a port each")
        return self


class KvStoreSettings(PoolSettings, LogSettings):
    """The KV page manager."""

    listen: ListenAddress = Field(DEFAULT_KVSTORE, description="address: HOST:PORT or unix:PATH")
    recover: bool = Field(
        True, description="take over the pool that a kvstore with this address has left"
    )
    keep_pool: bool = Field(
        False, description="leave the pool to the next one when stopped, not only when killed"
    )


class WorkerSettings(ModelSettings, MathSettings):
    """What a compute worker must know, in whichever process it runs."""

    draft_model: str = Field(
        "",
        description="a smaller model with the same tokenizer that guesses next tokens, "
        "in the forms of --model; empty: none",
    )


class ComputeSettings(WorkerSettings, LogSettings):
    """Prefill and paged decode."""

    listen: ListenAddress = Field("127.0.0.1:50052", description="address: HOST:PORT or unix:PATH")
    kvstore: str = Field(DEFAULT_KVSTORE, description="address of the kvstore")


class GatewaySettings(ModelSettings, ApiSettings, LogSettings):
    """REST and gRPC for applications."""

    kvstore: str = Field(DEFAULT_KVSTORE, description="address of the kvstore")
    compute: str = Field("127.0.0.1:50052", description="address of compute")


class UpSettings(WorkerSettings, PoolSettings, ApiSettings, LogSettings):
    """All three services under one supervisor."""

    @model_validator(mode="after")
    def _has_draft(self) -> Self:
        if self.speculation == "draft" and not self.draft_model:
            raise ValueError("--speculation draft needs a --draft-model")
        return self


class ChatSettings(_Settings):
    """A conversation in the terminal."""

    url: str = Field("http://127.0.0.1:8000", description="REST address of a running Quire")
    model: str = Field("", description="model to talk to; empty: the first one served")
    system: str = Field("", description="system prompt")
    max_tokens: int = Field(512, ge=1, description="longest answer")
    temperature: float = Field(0.7, ge=0, le=2, description="0: always the likeliest token")


class InspectSettings(_Settings):
    """What commands that look at a kvstore have in common."""

    kvstore: str = Field(
        "",
        description="address of the kvstore: HOST:PORT or unix:PATH; empty: that of the latest "
        f"`quire up` that runs, else {DEFAULT_KVSTORE}",
    )
    as_json: bool = Field(False, description="print JSON")


class FsckSettings(InspectSettings):
    """Check every invariant of a running kvstore's pool."""

    repair: bool = Field(False, description="make right what is wrong")


class PoolViewSettings(InspectSettings):
    """What is in a running kvstore's pool."""

    watch: bool = Field(False, description="show it anew each second, until Ctrl-C")


_COMMANDS = (
    KvStoreSettings,
    ComputeSettings,
    GatewaySettings,
    UpSettings,
    ChatSettings,
    FsckSettings,
    PoolViewSettings,
)


def known_options() -> set[str]:
    return {name for settings in _COMMANDS for name in settings.model_fields}


def doubtful_variables() -> list[str]:
    """A sentence for each QUIRE_* variable that is no option.

    Not errors: Kubernetes, for one, sets QUIRE_PORT and others for a service `quire`.
    """
    options = {_PREFIX + name.upper() for name in known_options()} | {_CONFIG_FILE}
    sentences = []
    for name in sorted(os.environ):
        if name.startswith(_PREFIX) and name not in options:
            near = difflib.get_close_matches(name, sorted(options), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            sentences.append(f"{name} in the environment is not an option{hint}")
    return sentences


S = TypeVar("S", bound=_Settings)


def load(kind: type[S], command: str, arguments: list[str]) -> S:
    """Settings of a command from its flags, the environment and the TOML file.

    Raises:
        ConfigError: a value is wrong; the text says which, and where it stands.
        SystemExit: --help, or an unknown flag, already printed.
    """
    try:
        return kind(_cli_parse_args=arguments, _cli_prog_name=f"quire {command}")  # type: ignore[call-arg]
    except ValidationError as error:
        first = error.errors()[0]
        name = "_".join(str(part) for part in first["loc"])
        text, given = first["msg"].removeprefix("Value error, "), repr(first["input"])
        if not name:  # several together
            raise ConfigError(text) from None
        if given not in text:
            text += f" (got {given})"
        raise ConfigError(f"{_place(name, arguments)}: {text}") from None


def _place(name: str, arguments: list[str]) -> str:
    """Where the value of an option was found, most important first."""
    flag = "--" + name.replace("_", "-")
    if any(word.partition("=")[0] == flag for word in arguments):
        return flag
    if (variable := _PREFIX + name.upper()) in os.environ:
        return variable
    return f"{name} in {_config_file()}"


def to_toml(settings: BaseSettings) -> str:
    """The settings as a TOML file that would reproduce them."""
    lines = []
    for name, info in type(settings).model_fields.items():
        value = getattr(settings, name)
        text = repr(value) if isinstance(value, int | float) else f'"{value}"'
        lines.append(f"# {(info.description or '')}\n{name} = {text}")
    return "\n".join(lines)
