"""Stop requests by time limit and by real signals."""

import math
import os
import signal
import subprocess
import sys
import time

import pytest

from rlframe.core.errors import Interrupted
from rlframe.study import process
from rlframe.system.signals import GRACE, OUT_OF_TIME, snapshot_grace_s, stop_request
from tests.processes import until


@pytest.fixture(autouse=True)
def _no_nohup():
    """Hang-ups are heard here, also where the tests were started with nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def send(signum: int) -> None:
    os.kill(os.getpid(), signum)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_request_has_its_signal_and_the_exit_status_of_a_shell(signum):
    with stop_request() as stop:
        send(signum)
        assert stop.reason() == OUT_OF_TIME + signum
        with pytest.raises(Interrupted) as caught:
            send(signal.SIGINT)
    assert caught.value.exit_status == 128 + signal.SIGINT


def test_a_second_signal_that_python_drops_in_a_destructor_is_raised_again(capsys):
    class Signals:
        def __del__(self):
            send(signal.SIGTERM)

    def work():
        Signals()  # raised here, and dropped
        time.sleep(10)

    with stop_request():
        send(signal.SIGINT)
        with pytest.raises(Interrupted) as caught:
            work()
    assert caught.value.exit_status == 128 + signal.SIGTERM
    assert "Traceback" not in capsys.readouterr().err


def test_a_queued_run_may_end_its_update_for_as_long_as_the_queue_waits(monkeypatch):
    assert snapshot_grace_s() == 7
    monkeypatch.setenv(GRACE, process._environment()[GRACE])
    assert 7 < snapshot_grace_s() < process.SNAPSHOT_S


def test_a_terminal_that_hangs_up_twice_asks_once():
    with stop_request() as stop:
        send(signal.SIGHUP)
        send(signal.SIGHUP)
        assert stop.signum == signal.SIGHUP


def test_under_nohup_a_hangup_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_request() as stop:
            send(signal.SIGHUP)
            assert not stop
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_work_is_interrupted_after_the_grace_period_with_the_first_signal():
    with stop_request(grace_s=0.1):
        send(signal.SIGHUP)
        with pytest.raises(Interrupted, match=r"within 0.1 s") as caught:
            until(lambda: False)
    assert caught.value.exit_status == 128 + signal.SIGHUP


def test_a_protected_block_suspends_the_grace_period():
    with stop_request(grace_s=0.1) as stop:
        with stop.protect():
            send(signal.SIGTERM)
            time.sleep(0.7)
        with pytest.raises(Interrupted):
            until(lambda: False)


def test_the_grace_period_begins_anew_after_a_protected_block_that_took_longer():
    try:
        with stop_request(grace_s=1.0) as stop:
            send(signal.SIGTERM)
            with stop.protect():
                time.sleep(1.1)
            time.sleep(0.6)  # the end of the run, in which two looks at the time fall
    except Interrupted as error:
        pytest.fail(str(error))


def test_a_time_limit_is_a_weaker_reason_than_a_signal():
    with stop_request(max_time_s=0.5) as stop:
        assert stop.reason() == 0
        until(lambda: bool(stop))
        assert stop.reason() == OUT_OF_TIME
        send(signal.SIGTERM)
        assert stop.reason() == OUT_OF_TIME + signal.SIGTERM


def test_the_first_signal_is_forwarded_once():
    heard: list[int] = []
    with stop_request(math.inf, 0.0, heard.append):
        send(signal.SIGHUP)
        send(signal.SIGHUP)
    assert heard == [signal.SIGHUP]


HANGING_UP = """
import os, signal, sys
from rlframe.system.signals import stop_request
with stop_request() as stop:
    print("ready", flush=True)
    while not stop:
        signal.sigtimedwait([], 0.05)
    print("to nobody", flush=True)
    print("to nobody", file=sys.stderr, flush=True)
os._exit(7)
"""


def test_output_to_a_terminal_that_is_gone_does_no_harm():
    ours, theirs = os.openpty()
    code = f"import os, fcntl, termios\nos.setsid()\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)\n{HANGING_UP}"
    with subprocess.Popen([sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        assert b"ready" in os.read(ours, 100)
        os.close(ours)  # the terminal's window is closed: the kernel sends SIGHUP
        assert process.wait(timeout=20) == 7
