"""What is asked again, and how much a store in trouble is asked."""

from __future__ import annotations

import errno
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from loaderd.storage.retries import RateLimiter, call_with_retries, is_of_credentials, may_pass

THREADS = 32


class _Store:
    """Answers ``most`` requests at a time, each after ``takes_s``, and refuses the others."""

    def __init__(self, most: int, takes_s: float = 0.005) -> None:
        self.most, self._takes_s = most, takes_s
        self.answered = self.refused = self.under_way = self.most_at_once = 0
        self.at_once: list[int] = []
        """How many requests were under way with each."""
        self._lock = threading.Lock()

    def ask(self) -> None:
        with self._lock:
            self.under_way += 1
            self.most_at_once = max(self.most_at_once, self.under_way)
            self.at_once.append(self.under_way)
            is_too_much = self.under_way > self.most
        time.sleep(self._takes_s)
        with self._lock:
            self.under_way -= 1
            if is_too_much:
                self.refused += 1
                raise OSError("AWS Error SLOW_DOWN during GetObject operation")
            self.answered += 1


def _ask_often(store: _Store, pace: RateLimiter, times: int, retry_s: float = 60.0) -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        asked = [pool.submit(call_with_retries, store.ask, retry_s, lambda: None, pace) for _ in range(times)]
        for each in asked:
            each.result()


def test_a_store_that_says_slow_down_is_asked_less_by_all_threads_together():
    store = _Store(most=8)
    _ask_often(store, RateLimiter(THREADS), 400)
    assert store.answered == 400
    assert max(store.at_once[len(store.at_once) // 4 :]) <= 12, "not 32, and not 20, as with a pause for each alone"


def test_a_store_that_is_not_in_trouble_gets_all_requests_at_once():
    store, pace = _Store(most=THREADS, takes_s=0.02), RateLimiter(THREADS)
    _ask_often(store, pace, 2 * THREADS)
    assert store.most_at_once > THREADS / 2 and store.refused == 0


def test_a_store_that_answers_nobody_is_asked_by_one_and_then_by_all_again():
    store, pace, alone = _Store(most=0), RateLimiter(THREADS), []

    def come_back() -> None:
        while pace._pauses._pause_s < 0.8:
            time.sleep(0.01)
        store.most_at_once, refused = 0, store.refused
        while store.refused < refused + 2:
            time.sleep(0.01)
        alone.append(store.most_at_once)
        store.most, store.most_at_once = THREADS, 0

    watcher = threading.Thread(target=come_back)
    watcher.start()
    _ask_often(store, pace, 400)
    watcher.join()
    assert alone == [1] and store.answered == 400
    assert store.most_at_once > THREADS / 4, "it gets as much as before"


def test_whoever_waits_for_a_turn_gives_up_when_nobody_was_answered_for_long():
    pace, held = RateLimiter(1), threading.Event()

    def fail() -> None:
        held.wait()
        raise OSError(errno.EIO, "away")

    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(call_with_retries, fail, 0.3, lambda: None, pace) for _ in range(3)]
        time.sleep(0.05)
        held.set()
        for each in asked:
            with pytest.raises(OSError, match="away"):
                each.result(30)


def test_a_request_that_fails_for_itself_fails_while_others_are_answered():
    pace, is_over = RateLimiter(4), threading.Event()

    def fail() -> None:
        raise OSError("AWS Error INTERNAL_FAILURE during GetObject operation")

    def ask_on() -> None:
        while not is_over.is_set():
            call_with_retries(lambda: time.sleep(0.001), 60.0, lambda: None, pace)

    with ThreadPoolExecutor(2) as pool:
        others = pool.submit(ask_on)
        with pytest.raises(OSError, match="INTERNAL_FAILURE"):
            call_with_retries(fail, 0.3, lambda: None, pace)
        is_over.set()
        others.result(30)


def test_an_interrupted_request_leaves_its_turn_to_the_next():
    def interrupt() -> None:
        raise KeyboardInterrupt

    pace = RateLimiter(1)
    with pytest.raises(KeyboardInterrupt):
        call_with_retries(interrupt, 60.0, lambda: None, pace)
    assert call_with_retries(lambda: "answer", 60.0, lambda: None, pace) == "answer"


@pytest.mark.parametrize(
    ("said", "passes", "of_credentials"),
    [
        ("AWS Error SLOW_DOWN during GetObject operation: Reduce your request rate.", True, False),
        ("AWS Error UNKNOWN (HTTP status 503) during HeadObject operation: No response body.", True, False),
        ("AWS Error NETWORK_CONNECTION during HeadObject operation: curlCode: 28, Timeout was reached", True, False),
        (
            "AWS Error NETWORK_CONNECTION during HeadObject operation: curlCode: 6, Could not resolve host",
            True,
            False,
        ),
        ("AWS Error UNKNOWN (HTTP status 400) during HeadObject operation: No response body.", False, True),
        ("AWS Error ACCESS_DENIED during HeadObject operation: No response body.", False, True),
        ("AWS Error UNKNOWN (HTTP status 301) during HeadObject operation: No response body.", False, False),
        ("google::cloud::Status(UNAVAILABLE: … Could not create a OAuth2 access token …", False, True),
        ("… N5Azure4Core11Credentials23AuthenticationExceptionE: Failed to get token …", False, True),
        ("Unable to load libjvm\ndlopen(…) failed", False, False),
    ],
)
def test_what_may_pass(said: str, passes: bool, of_credentials: bool):
    assert (may_pass(OSError(said)), is_of_credentials(OSError(said))) == (passes, of_credentials)
