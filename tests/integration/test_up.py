"""The supervisor: start, failures to start, a service that dies, a clean end."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
from quire.gateway.v1 import gateway_pb2 as pb
from quire.gateway.v1.gateway_pb2_grpc import GenerationServiceStub

from tests.integration.running import free_port, pools_of, start_quire


def run_up(*flags: str) -> subprocess.CompletedProcess:
    """A start that is to fail, on ports that are free unless the flags say otherwise."""
    ports = [f"--{name}=127.0.0.1:{free_port()}" for name in ("http", "grpc")]
    return subprocess.run(
        [sys.executable, "-m", "services.cli", "up", *ports, *flags],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def assert_one_clear_line(result: subprocess.CompletedProcess, *words: str) -> None:
    assert result.returncode != 0
    failures = [line for line in result.stderr.splitlines() if line.startswith("quire: ")]
    assert len(failures) == 1, result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in failures[0]


def test_announces_its_addresses_and_a_command_to_try(quire):
    text = quire.log.read_text()
    assert f"http://{quire.http}/v1" in text
    assert quire.grpc in text
    command = text[text.index("curl ") :].splitlines()[0]
    answer = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert '"finish_reason"' in answer.stdout


def lines_about(running, request_id: str) -> set[str]:
    """The services that logged something of a request."""
    lines = running.log.read_text().splitlines()
    return {line.split(" ")[0] for line in lines if f"request_id={request_id}" in line}


def test_every_service_logs_the_request_id(quire, model_files):
    body = {"model": model_files.model_id, "prompt": ["Hello", "Goodbye"], "max_tokens": 2}
    headers = {"x-request-id": "trace.me-1"}
    answer = httpx.post(f"{quire.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.headers["x-request-id"] == "trace.me-1"
    with grpc.insecure_channel(quire.grpc) as channel:
        request = pb.GenerateRequest(text="Hello", max_token_count=2, request_id="trace-me-2")
        list(GenerationServiceStub(channel).Generate(request, timeout=60))
    quire.wait_logged("request method=Generate request_id=trace-me-2")
    for request_id in ("trace.me-1", "trace-me-2"):
        assert lines_about(quire, request_id) == {"kvstore", "compute", "gateway"}


def test_ctrl_c_ends_all_processes_and_releases_the_pool(model_files, tmp_path):
    running = start_quire(tmp_path / "log", "--kv-memory", "64MiB")
    running.wait_started()
    children = psutil.Process(running.process.pid).children()
    assert len(children) == 3
    (pool,) = pools_of(running.child("kvstore"))
    assert pool.stat().st_size <= 64 * 2**20
    assert running.stop() == 0
    assert not [child for child in children if child.is_running()]
    assert not pool.exists()


@pytest.mark.parametrize("service", ["kvstore", "compute", "gateway"])
def test_a_service_that_dies_ends_all_with_its_name(model_files, tmp_path, service):
    running = start_quire(tmp_path / "log", "--kv-memory", "64MiB")
    running.wait_started()
    children = psutil.Process(running.process.pid).children()
    (pool,) = pools_of(running.child("kvstore"))
    running.child(service).send_signal(signal.SIGKILL)
    assert running.process.wait(30) == 1
    assert f"{service} was ended by SIGKILL" in running.log.read_text()
    assert not [child for child in children if child.is_running()]
    # A killed owner cannot clean up; the next kvstore does.
    assert pool.exists() == (service == "kvstore")


def test_a_killed_supervisor_takes_its_services_along(model_files, tmp_path):
    running = start_quire(tmp_path / "log", "--kv-memory", "64MiB")
    running.wait_started()
    children = psutil.Process(running.process.pid).children()
    running.process.kill()
    running.process.wait()
    _, alive = psutil.wait_procs(children, timeout=15)
    assert not alive


def test_a_busy_port_is_one_line(model_files):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert_one_clear_line(run_up("--http", address), "--http", address)
        assert_one_clear_line(run_up("--grpc", address), "--grpc", address)


@pytest.mark.parametrize("model", ["/nowhere/model", "/nowhere/model.gguf"])
def test_a_missing_model_is_one_line(model):
    assert_one_clear_line(run_up("--model", model), model)


def test_a_cache_directory_that_cannot_be_made_is_one_line():
    assert_one_clear_line(run_up("--cache-dir", "/proc/nowhere"), "/proc/nowhere")


def test_a_file_that_is_no_model_is_one_line(tmp_path):
    path = tmp_path / "noise.gguf"
    path.write_bytes(b"not a model at all")
    assert_one_clear_line(run_up("--model", str(path)), str(path))


def test_a_truncated_model_is_one_line(model_files, tmp_path):
    whole = model_files.weights.read_bytes()
    path = tmp_path / "short.gguf"
    path.write_bytes(whole[: len(whole) // 2])
    assert_one_clear_line(run_up("--model", str(path), "--kv-memory", "64MiB"))


def test_no_room_in_shared_memory_is_one_line_and_leaves_nothing(model_files):
    assert_one_clear_line(run_up("--kv-memory", "900TiB"), "--kv-memory")
    assert not [
        p
        for p in psutil.process_iter(["cmdline"])
        if "--kv-memory=900TiB" in (p.info["cmdline"] or ())
    ]


def test_files_where_it_is_started_play_no_part(model_files, tmp_path, monkeypatch):
    (tmp_path / "grpc.py").write_text("raise SystemExit('not the library')")
    (tmp_path / "quire").mkdir()
    monkeypatch.chdir(tmp_path)
    # What the first service says shows that it came as far as its own work.
    ports = [f"--{name}=127.0.0.1:{free_port()}" for name in ("http", "grpc")]
    command = Path(sys.executable).with_name("quire")
    result = subprocess.run(
        [command, "up", *ports, "--kv-memory", "900TiB"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert_one_clear_line(result, "--kv-memory")


def test_a_wrong_option_is_one_line():
    assert_one_clear_line(run_up("--block-size", "12"), "--block-size", "8, 16 or 32")
    assert_one_clear_line(run_up("--kv-memory", "lots"), "--kv-memory")


@pytest.mark.parametrize("service", ["compute", "kvstore"])
def test_readiness_ends_with_a_stopped_service_and_returns_with_it(model_files, tmp_path, service):
    """Fault A6: a health check must not stay green with a stopped engine behind it."""
    patience = ("--step-timeout", "3", "--queue-timeout", "6")
    running = start_quire(tmp_path / "log", "--kv-memory", "64MiB", *patience)
    try:
        running.wait_started()
        stopped = running.child(service)
        stopped.suspend()
        body = {"model": model_files.model_id, "prompt": "Hello", "max_tokens": 4}
        answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 503
        running.wait_logged(f"{service} is overdue")
        assert httpx.get(f"{running.url}/health/ready").status_code == 503
        assert httpx.get(f"{running.url}/health/live").status_code == 200
        stopped.resume()
        running.wait_ready(30)
        answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=30)
        assert answer.status_code == 200, answer.text
    finally:
        running.stop()


def test_a_request_that_waits_outlasts_a_stall(model_files, tmp_path):
    running = start_quire(tmp_path / "log", "--kv-memory", "64MiB", "--step-timeout", "2")
    try:
        running.wait_started()
        kvstore = running.child("kvstore")
        kvstore.suspend()
        threading.Timer(8, kvstore.resume).start()
        body = {"model": model_files.model_id, "prompt": "Hello", "max_tokens": 4}
        answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
    finally:
        running.stop()
