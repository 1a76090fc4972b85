"""A real tool: the model writes <calc>12*(3+4)</calc>, the environment answers <result>84</result>."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from typing import Any

from docklands.envs.base import ENVS, StepResult
from docklands.errors import ConfigError, EnvError

CALL = re.compile(r"<calc>((?:(?!<calc>).)*?)</calc>\s*$", re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
MOST_CHARACTERS = 200
MOST_NODES = 100
MOST_DEPTH = 30
MOST_BITS = 512
MOST_EXPONENT = 256

BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class BadExpression(Exception):
    """The model's mistake; its text is what the model reads."""


@ENVS.add("calculator")
class Calculator:
    """Answers calculator calls; a turn without a call is the final answer and ends the episode.

    max_turns  model turns at most
    column     where the row has the answer; the last number of the final turn is held against it
    pay        reward of a right answer
    Malformed expressions are answered with an error text: they are the model's to learn from, not a failure.
    """

    def __init__(self, max_turns: int = 4, column: str = "answer", pay: float = 1.0) -> None:
        if max_turns < 2:
            raise ConfigError(
                f"env calculator: max_turns {max_turns} leaves no turn after a call", "env.max_turns: 2 or more"
            )
        self.max_turns = max_turns
        self.column = column
        self.pay = pay
        self._expected = 0.0
        self._calls = 0

    async def reset(self, row: dict[str, Any]) -> None:
        """EnvError when the row has no numeric answer."""
        answer = row.get(self.column)
        try:
            self._expected = float(str(answer).replace(",", ""))
            if not math.isfinite(self._expected):
                raise ValueError
        except ValueError:
            raise EnvError(f"calculator: the row's {self.column!r} is {answer!r}, not a number") from None
        self._calls = 0

    async def step(self, completion: str, finish: str) -> StepResult:
        """A call at the end of the turn is evaluated; anything else is judged as the final answer."""
        call = CALL.search(completion)
        if call is not None and finish == "stop":
            self._calls += 1
            return StepResult(f"<result>{answer_to(call.group(1))}</result>", 0.0, False, {"calls": self._calls})
        numbers = NUMBER.findall(completion.rpartition("</calc>")[2].replace(",", ""))
        right = finish == "stop" and bool(numbers) and math.isclose(float(numbers[-1]), self._expected, rel_tol=1e-9)
        return StepResult(None, self.pay if right else 0.0, True, {"calls": self._calls})


def answer_to(expression: str) -> str:
    """The value as text, or 'error: ...'."""
    try:
        return written(evaluate(expression))
    except BadExpression as error:
        return f"error: {error}"


def evaluate(expression: str) -> int | float:
    """Arithmetic on + - * / // % ** and parentheses, in bounded time and memory. BadExpression otherwise."""
    if len(expression) > MOST_CHARACTERS:
        raise BadExpression(f"longer than {MOST_CHARACTERS} characters")
    if any(token in expression for token in ("\n", "\0", "\\")):
        raise BadExpression("one line, please")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise BadExpression("not an arithmetic expression") from None
    if sum(1 for _ in ast.walk(tree)) > MOST_NODES:
        raise BadExpression("too many operations")
    return _value(tree.body, MOST_DEPTH)


def _value(node: ast.expr, depth: int) -> int | float:
    if depth == 0:
        raise BadExpression("nested too deeply")
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _checked(node.value)  # type: ignore[arg-type]
    if isinstance(node, ast.UnaryOp) and type(node.op) in UNARY:
        return _checked(UNARY[type(node.op)](_value(node.operand, depth - 1)))
    if isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        left, right = _value(node.left, depth - 1), _value(node.right, depth - 1)
        if isinstance(node.op, ast.Pow):
            _check_power(left, right)
        try:
            return _checked(BINARY[type(node.op)](left, right))
        except ZeroDivisionError:
            raise BadExpression("division by zero") from None
        except (OverflowError, ValueError):
            raise BadExpression("the number is too large") from None
    raise BadExpression("only numbers, + - * / // % ** and parentheses")


def _check_power(base: float, exponent: float) -> None:
    """Refuse before computing: the size of a power is known from its parts."""
    if abs(exponent) > MOST_EXPONENT or (isinstance(base, int) and base.bit_length() * abs(exponent) > MOST_BITS):
        raise BadExpression("the power is too large")
    if base < 0 and not float(exponent).is_integer():
        raise BadExpression("a root of a negative number")


def _checked(value: Any) -> int | float:
    if isinstance(value, int) and value.bit_length() <= MOST_BITS:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise BadExpression("the number is too large")


def written(value: int | float) -> str:
    """'84', '2.5', '0.333333333333': twelve digits, no needless '.0'."""
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e15):
        return str(int(value))
    return f"{value:.12g}"
