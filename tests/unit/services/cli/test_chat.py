"""`quire chat` against a server that answers from a script."""

from __future__ import annotations

import json
from contextlib import closing
from io import StringIO

import httpx
import pytest
from rich.console import Console

from services.cli import chat
from services.common.config import ChatSettings
from services.common.startup import StartupError


class Server:
    """Answers each chat with the next of `answers`: pieces, or a response."""

    def __init__(self):
        self.answers = []
        self.bodies = []

    def __call__(self, request):
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}, {"id": "other"}]})
        self.bodies.append(json.loads(request.content))
        answer = self.answers.pop(0)
        if isinstance(answer, httpx.Response):
            return answer
        chunks = [{"choices": [{"delta": {"content": piece}}]} for piece in answer]
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        return httpx.Response(200, text="".join(lines) + "data: [DONE]\n\n")


@pytest.fixture
def server(monkeypatch):
    server = Server()
    client = httpx.Client
    monkeypatch.setattr(
        chat.httpx,
        "Client",
        lambda **kwargs: client(transport=httpx.MockTransport(server), **kwargs),
    )
    return server


@pytest.fixture
def talk(server, monkeypatch):
    """Type lines; what appeared on the screen."""

    def talk(*lines, **settings):
        typed = iter(lines)

        def read(prompt):
            line = next(typed, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr("builtins.input", read)
        screen = StringIO()
        with chat.Conversation(ChatSettings(**settings)) as conversation:
            chat.Terminal(conversation, Console(file=screen, highlight=False)).run()
        return screen.getvalue()

    return talk


def said(body):
    return [(message["role"], message["content"]) for message in body["messages"]]


def test_each_question_takes_the_history_along(server, talk):
    server.answers = [["Hel", "lo"], ["Bye"]]
    screen = talk("hi", "and?", system="be brief")
    assert "Hello" in screen
    assert said(server.bodies[1]) == [
        ("system", "be brief"),
        ("user", "hi"),
        ("assistant", "Hello"),
        ("user", "and?"),
    ]


def test_options_and_model_reach_the_server(server, talk):
    server.answers = [["x"]]
    talk("hi", model="other", max_tokens=7, temperature=0.0)
    [body] = server.bodies
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("other", 7, 0.0)


def test_reset_forgets_all_but_the_system_prompt(server, talk):
    server.answers = [["a"], ["b"], ["c"]]
    talk("one", "/reset", "two", "/system new", "three", system="old")
    assert said(server.bodies[1]) == [("system", "old"), ("user", "two")]
    assert said(server.bodies[2]) == [("system", "new"), ("user", "three")]


def test_exit_leaves_and_unknown_commands_explain(server, talk):
    server.answers = []
    screen = talk("/what", "", "/exit", "never asked")
    assert screen.count("/reset: start over") == 2
    assert server.bodies == []


def test_ctrl_c_at_the_prompt_stays(server, talk):
    server.answers = [["still here"]]
    assert "still here" in talk(KeyboardInterrupt(), "hi")


def test_ctrl_c_amid_an_answer_keeps_what_came(server, talk, monkeypatch):
    server.answers = [["part", "rest"], ["ok"]]
    show = Console.print

    def interrupted(self, *objects, **options):
        if str(objects[:1]).find("rest") >= 0:
            raise KeyboardInterrupt
        show(self, *objects, **options)

    monkeypatch.setattr(Console, "print", interrupted)
    screen = talk("hi", "go on")
    assert "stopped" in screen
    assert said(server.bodies[1])[:2] == [("user", "hi"), ("assistant", "partrest")]


def test_refused_question_is_shown_and_forgotten(server, talk):
    refusal = httpx.Response(429, json={"error": {"message": "3 requests are waiting already"}})
    server.answers = [refusal, ["ok"]]
    assert "3 requests are waiting already" in talk("hi", "again")
    assert said(server.bodies[1]) == [("user", "again")]


def test_error_amid_an_answer_is_shown(server, talk):
    chunk = {"choices": [{"delta": {"content": "begun"}}]}
    error = {"error": {"message": "compute is gone"}}
    lines = [f"data: {json.dumps(data)}\n\n" for data in (chunk, error)]
    server.answers = [httpx.Response(200, text="".join(lines))]
    screen = talk("hi")
    assert "begun" in screen
    assert "compute is gone" in screen


def test_answer_cannot_steer_the_terminal(server, talk):
    server.answers = [["a\x1b[2Jb\x07\tc\x9b"]]
    screen = talk("hi")
    assert not {"\x1b", "\x07", "\x9b"} & set(screen)
    assert "a[2Jb" in screen


def test_model_that_is_not_served_is_one_line(server, talk):
    with pytest.raises(StartupError, match="'nope' is not served, but m, other"):
        talk(model="nope")


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nonsense", "http://[::1", ""])
def test_no_server_is_one_line(url):
    with pytest.raises(StartupError) as raised:
        chat.Conversation(ChatSettings(url=url))
    assert "\n" not in str(raised.value)
    assert "quire up" in str(raised.value)


def test_closing_an_answer_closes_its_connection(server):
    server.answers = [["a", "b"]]
    with chat.Conversation(ChatSettings()) as conversation:
        with closing(conversation.ask("hi")) as pieces:
            assert next(pieces) == "a"
        assert conversation.history[-1] == {"role": "assistant", "content": "a"}
