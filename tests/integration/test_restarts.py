"""Services started one by one over TCP: either side restarts alone, and the pages stay."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.integration.running import free_port, pools_of

START_SECONDS = 120
# Many tokens: a prompt of several full blocks.
PROMPT = "The quick brown fox jumps over the lazy dog. " * 12


class Cell:
    """kvstore, compute and gateway as processes that are started and killed one by one."""

    def __init__(self, folder: Path, model: str) -> None:
        self._folder = folder
        self._processes: dict[str, subprocess.Popen] = {}
        self.pools: set[Path] = set()  # all that its kvstores have made
        kvstore, compute, grpc, self.http = (f"127.0.0.1:{free_port()}" for _ in range(4))
        self.model = model
        peers = ["--kvstore", kvstore]
        self._flags = {
            "kvstore": ["--listen", kvstore, "--kv-memory", "96MiB"],
            "compute": ["--listen", compute, *peers],
            "gateway": ["--http", self.http, "--grpc", grpc, "--compute", compute, *peers],
        }

    def start(self, service: str) -> None:
        command = [sys.executable, "-m", "services.cli", f"serve-{service}"]
        with (self._folder / f"{service}.log").open("a") as log:
            self._processes[service] = subprocess.Popen(
                [*command, *self._flags[service]], stdout=log, stderr=log, start_new_session=True
            )

    def kill(self, service: str) -> None:
        self._processes[service].kill()
        self._processes[service].wait()

    def process(self, service: str) -> psutil.Process:
        return psutil.Process(self._processes[service].pid)

    def wait_ready(self, expected: int = 200) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"http://{self.http}/health/ready").status_code == expected:
                    if expected == 200:
                        self.pools |= pools_of(self.process("kvstore"))
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        raise AssertionError(f"/health/ready was not {expected} in time\n{self.logs()}")

    def complete(self, prompt: str = PROMPT, max_tokens: int = 8) -> httpx.Response:
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        return httpx.post(f"http://{self.http}/v1/completions", json=body, timeout=60)

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self._folder.glob("*.log")))

    def stop(self) -> None:
        for service in ("gateway", "compute", "kvstore"):
            process = self._processes.get(service)
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(30)


@pytest.fixture
def cell(model_files, tmp_path) -> Iterator[Cell]:
    cell = Cell(tmp_path, model_files.model_id)
    for service in ("kvstore", "compute", "gateway"):
        cell.start(service)
        if service == "kvstore":
            time.sleep(2)  # compute asks for its pool only after loading; this is for order
    try:
        cell.wait_ready()
        yield cell
    finally:
        cell.stop()
    assert not [pool for pool in cell.pools if pool.exists()]


def cached_tokens(answer: httpx.Response) -> int:
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def assert_ends_well(answer: httpx.Response) -> None:
    """A result, or an error that says: try again."""
    assert answer.status_code in (200, 503), answer.text
    if answer.status_code == 503:
        assert "retry-after" in answer.headers
        assert answer.json()["error"]["code"] == "unavailable"


def test_a_new_compute_finds_the_pages_of_the_killed_one(cell):
    """The point of a page manager in its own process: computed pages outlive compute."""
    first = cell.complete()
    assert cached_tokens(first) == 0
    cell.kill("compute")
    cell.wait_ready(503)
    assert_ends_well(cell.complete())
    cell.start("compute")
    cell.wait_ready()
    again = cell.complete()
    assert text(again) == text(first)
    assert cached_tokens(again) > 0


def test_a_killed_kvstore_is_replaced_under_the_running_others(cell):
    """Fault P2: restarting the cache server must not need a restart of the engine."""
    first = cell.complete()
    assert cached_tokens(cell.complete()) > 0
    cell.kill("kvstore")
    assert_ends_well(cell.complete())
    cell.start("kvstore")
    cell.wait_ready()
    deadline = time.monotonic() + 30
    answer = cell.complete()
    while answer.status_code == 503 and time.monotonic() < deadline:
        time.sleep(0.2)
        answer = cell.complete()
    assert text(answer) == text(first)
    assert cached_tokens(answer) > 0, "the pages outlive the kvstore"


def test_killing_compute_again_and_again_leaves_no_trace(cell):
    """Fault P1: a dead engine's mappings must not keep memory alive."""
    cell.complete()
    kvstore, gateway = cell.process("kvstore"), cell.process("gateway")
    assert len(cell.pools) == 1
    resident = kvstore.memory_info().rss
    for _ in range(5):
        cell.kill("compute")
        cell.wait_ready(503)
        cell.start("compute")
        cell.wait_ready()
        assert_ends_well(cell.complete())
    assert text(cell.complete())
    assert kvstore.is_running()
    assert gateway.is_running()
    assert len(cell.pools) == 1
    assert all(pool.exists() for pool in cell.pools)
    assert kvstore.memory_info().rss < resident + 16 * 2**20


def metric(cell: Cell, name: str) -> float:
    lines = httpx.get(f"http://{cell.http}/metrics").text.splitlines()
    return next(float(line.split(" ")[-1]) for line in lines if line.startswith(f"{name} "))


HELD = 'quire_kvstore_blocks{state="held"}'


def test_a_gateway_killed_under_load_leaves_nothing_held(cell):
    """Its sequences are in the kvstore, which outlives it; only the next driver can end them."""
    with ThreadPoolExecutor(16) as clients:
        begun = [clients.submit(post_until_cut, cell, f"{i} {PROMPT}") for i in range(16)]
        deadline = time.monotonic() + 30
        while metric(cell, HELD) < 64 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert metric(cell, HELD) >= 64
        cell.kill("gateway")
        assert not [one.result() for one in begun if one.result()]
    cell.start("gateway")
    cell.wait_ready()
    assert metric(cell, "quire_kvstore_sequences") == 0
    assert metric(cell, HELD) == 0
    assert text(cell.complete())


def post_until_cut(cell: Cell, prompt: str) -> bool:
    """Whether an answer came before the connection broke."""
    try:
        return cell.complete(prompt, max_tokens=400).status_code == 200
    except httpx.HTTPError:
        return False


def test_a_killed_gateway_leaves_blocks_that_the_next_one_can_use(cell):
    first = cell.complete()
    cell.kill("gateway")
    cell.start("gateway")
    cell.wait_ready()
    again = cell.complete()
    assert text(again) == text(first)
    assert cached_tokens(again) > 0


@pytest.mark.parametrize("worker", ["kvstore", "compute"])
def test_a_worker_killed_under_load_costs_no_request_and_no_token(cell, worker):
    """Its requests wait for the next one, and go on where they were."""
    prompts = [f"{number} {PROMPT}" for number in range(4)]
    expected = [text(cell.complete(prompt, max_tokens=150)) for prompt in prompts]
    with ThreadPoolExecutor(4) as clients:
        begun = [clients.submit(cell.complete, prompt, 150) for prompt in prompts]
        deadline = time.monotonic() + 30
        while metric(cell, "quire_requests_running") < 4 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert metric(cell, "quire_requests_running") == 4
        cell.kill(worker)
        cell.start(worker)
        answers = [one.result() for one in begun]
    assert [text(answer) for answer in answers] == expected
    assert metric(cell, "quire_reconnects_total") >= 1
    assert metric(cell, HELD) == 0
