import pytest

from fedlight.evaluation.sandbox import Limits, check_function, missing_protection

pytestmark = pytest.mark.skipif(missing_protection() is not None, reason=f"{missing_protection()}")

LIMITS = Limits(wall_seconds=120, cpu_seconds=60, memory_mib=256)  # never reached, however slow the machine
PROCESSOR = Limits(wall_seconds=120, cpu_seconds=1, memory_mib=256)
CLOCK = Limits(wall_seconds=0.5, cpu_seconds=60, memory_mib=256)
FAILED = "RuntimeError: the function failed: "
EQUALS, WRONG = "    def __eq__(self, other): return True", "def double(x): return 0"
TESTS = "assert double(3) == 6\nassert double(x=[1]) == [1, 1]"


def test_a_right_function_passes_and_tests_use_their_own_helpers() -> None:
    code = "import math\ndef double(x):\n    print('noise')\n    return x * 2"
    found = check_function(code, "double", TESTS, limits=LIMITS)
    assert (found.passed, found.outcome, found.detail) == (True, "finished", "")
    code = "def helper(x): return 0\ndef double(x): return 2 * x"
    tests, prelude = "assert double(helper(3)) == 8", "def helper(x): return x + 1\ndef double(x): pass"
    assert check_function(code, "double", tests, prelude=prelude, limits=LIMITS).passed


@pytest.mark.parametrize(
    ("code", "outcome", "detail"),
    [
        ("def double(x): return x", "error", "AssertionError"),
        ("def double(x): return None", "error", "AssertionError"),
        ("def other(x): return 2 * x", "error", "NameError: name 'double' is not defined"),
        ("def double(x) return 2 * x", "error", "SyntaxError: expected ':'"),
        ("def double(x): raise KeyError(x)", "error", f"{FAILED}KeyError: 3"),
        ("def double(x): return double(x)", "error", f"{FAILED}RecursionError: maximum recursion"),
        ("def double(x):\n    x = [0]\n    while True: x = x * 2", "error", f"{FAILED}MemoryError:"),
        ("import os; os._exit(0)", "exited", ""),
        ("def double(x):\n    import os\n    os._exit(0)", "exited", ""),
        ("raise SystemExit(0)", "error", "SystemExit: 0"),
        ("def double(x): raise SystemExit(0)", "error", "SystemExit: 0"),
        (f"class Equal(int):\n{EQUALS}\ndef double(x): return Equal(0)", "error", "AssertionError"),
        (f"class Equal:\n{EQUALS}\ndef double(x): return Equal()", "error", "RuntimeError: the function"),
        (f"import builtins\nbuiltins.AssertionError = ValueError\n{WRONG}", "error", "AssertionError"),
        (f"import sys\nfor name in list(sys.modules): del sys.modules[name]\n{WRONG}", "error", ""),
        ("import gc, types\ndef double(x):\n    for o in gc.get_objects(): o.passed = True", "error", ""),
    ],
)
def test_everything_else_fails(code: str, outcome: str, detail: str) -> None:
    found = check_function(code, "double", TESTS, limits=LIMITS)
    assert (found.passed, found.outcome) == (False, outcome), found
    assert found.detail.startswith(detail), found


@pytest.mark.parametrize(
    ("code", "limits"),
    [
        ("def double(x):\n    while True: pass", PROCESSOR),
        ("import sys\nsys.modules['sandbox_calls'].send = print\ndef double(x): return 0", CLOCK),
    ],
)
def test_what_does_not_answer_is_stopped(code: str, limits: Limits) -> None:
    found = check_function(code, "double", TESTS, limits=limits)
    assert (found.passed, found.outcome, found.detail) == (False, "timeout", ""), found


@pytest.mark.parametrize(
    "answer",
    [
        b"garbage",
        b'["value", {"pickle": "x"}]',
        b'["value", {"int": "zz"}]',
        b'["value", {"tuple": 3}]',
        b"[" * 100_000,
        b'{"value": 6}',
    ],
)
def test_forged_answers_fail(answer: bytes) -> None:
    """The code answers the tests by itself, past the protocol; only JSON of plain values is taken from it."""
    code = f"""
import os, struct
answer = bytes({answer!r})
for pipe in range(3, 32):
    try: os.write(pipe, struct.pack("=Q", len(answer)) + answer)
    except OSError: pass
def double(x): return 0
"""
    assert not check_function(code, "double", TESTS, limits=LIMITS).passed


def test_a_forged_answer_of_the_right_value_is_only_an_answer() -> None:
    """Whatever the code does, it can give answers; it does not know the tests, and cannot end them."""
    code = """
import os, struct
for text in (b'["value", 6]', b'["value", {"list": [1, 2]}]'):
    for pipe in range(3, 32):
        try: os.write(pipe, struct.pack("=Q", len(text)) + text)
        except OSError: pass
def double(x): return 0
"""
    assert not check_function(code, "double", TESTS, limits=LIMITS).passed


def test_tests_that_do_not_end_are_stopped() -> None:
    found = check_function("def f(): pass", "f", "import time; time.sleep(60)", limits=CLOCK)
    assert (found.passed, found.outcome) == (False, "timeout")
