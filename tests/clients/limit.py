"""The limits that each client meets, and the behaviour that is expected then."""

import contextlib
import threading
import time
import typing


class Limit(typing.NamedTuple):
    name: str
    # The gateway's settings.
    settings: dict
    # Makes the gateway reach the limit for the duration of a block.
    reached: typing.Callable
    # Whether the client gets its answer in the end; `None` means either.
    is_answered: bool | None
    # How many attempts each of the client's calls may take; without a value, the attempts are measured and not judged.
    attempts: tuple
    # Whether the limit applies only to calls that make a model generate.
    is_of_turns: bool = False
    # The provider's script.
    script: str = ""


@contextlib.contextmanager
def nothing(_gateway):
    yield


@contextlib.contextmanager
def one_call_spent(gateway):
    """Spends 60 input tokens and 5 output tokens, as the script says."""
    connection, response = gateway.own_call("input=60")
    assert response.status == 200, response.read()
    response.read()
    connection.close()
    yield


@contextlib.contextmanager
def time_over(_gateway):
    time.sleep(1.1)
    yield


@contextlib.contextmanager
def place_taken(gateway):
    """Keeps one call of the test open all the time."""
    call = open_call(gateway)
    yield
    leave(call)


@contextlib.contextmanager
def place_taken_at_first(gateway):
    """Keeps one call of the test open until the client has been refused once."""
    call = open_call(gateway)
    over = threading.Event()

    def give_way():
        while not over.is_set() and not gateway.refused():
            time.sleep(0.02)
        leave(call)

    thread = threading.Thread(target=give_way)
    thread.start()
    yield
    over.set()
    thread.join()


def open_call(gateway):
    """The stream is so slow that its client need not read it; a faster one would be cut because its client does not read."""
    call = gateway.own_call("chunks=100000;interval=10s", stream=True)
    assert call[1].status == 200, call[1].read()
    return call


def leave(call):
    for end in reversed(call):
        end.close()


NONE = Limit("no limit", {}, nothing, True, (1,))
# One attempt is served, and one is refused.
AFTER_ONE_TURN = Limit("after one turn", {"MAX_TURNS": "1"}, nothing, False, (1,))
TOKENS = Limit("tokens", {"MAX_TOTAL_TOKENS": "60"}, one_call_spent, False, (1,))
LIMITS = [
    NONE,
    Limit("turns", {"MAX_TURNS": "1"}, one_call_spent, False, (1,), is_of_turns=True),
    TOKENS,
    Limit("money", {"MAX_COST_USD": "0.000000001"}, nothing, False, (1,)),
    Limit("deadline", {"RUN_DEADLINE_SECONDS": "1"}, time_over, False, (1,)),
    Limit("model", {"MODELS": "another"}, nothing, False, (1,)),
    # The client's answer ends as a model's does at its limit. A client that continues then meets the spent budget once.
    Limit("cut off", {"MAX_OUTPUT_TOKENS": "20"}, nothing, None, (1, 2), is_of_turns=True, script="chunks=100000"),
    Limit("busy, then free", {"MAX_CONCURRENT": "1"}, place_taken_at_first, True, (2,)),
    Limit("busy for good", {"MAX_CONCURRENT": "1"}, place_taken, False, ()),
]
