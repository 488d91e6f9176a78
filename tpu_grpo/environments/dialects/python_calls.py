"""Tool calls as in Python, with values written out. Some templates put marks around them, which are found in these.

[add(a=47, b=38), now()]                    Llama 3.2: a list that is the whole turn
<|python_start|>[add(a=47, b=38)]<|python_end|>
<|call|>add(47,38)<|end_call|>              the built-in model: arguments by position
"""

import ast
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tpu_grpo.environments.actions import BadCall, ToolCall
from tpu_grpo.environments.dialects.json_calls import Calls
from tpu_grpo.environments.dialects.xml_calls import Schemas

_WORDS = {"true": True, "false": False, "null": None}
"""Names of JSON that models, and templates that write values by tojson, put for Python's."""
_LIST = re.compile(r"\[\s*[A-Za-z_][\w.]*\(")


@dataclass(frozen=True)
class PythonCalls:
    """A PythonCalls reads the calls of turns; opening and closing marks are empty where a template writes none."""

    schemas: Schemas
    opening: str = ""
    closing: str = ""

    def read(self, text: str, *, ended: bool) -> tuple[str, Calls]:
        """Return the text around the calls of a turn, and the calls; a cut turn loses a call that is not closed.

        Without marks, a turn is calls if it begins like a list of them, or like a call of a known tool.
        """
        if not self.opening:
            return self._bare(text, ended)
        content, calls, at = "", [], 0
        while (opened := text.find(self.opening, at)) >= 0:
            content += text[at:opened]
            begin = opened + len(self.opening)
            closed = text.find(self.closing, begin) if self.closing else text.find(self.opening, begin)
            if closed < 0 and self.closing:
                missing = BadCall(f"the call is not closed: {self.closing} is missing")
                return content, [*calls, *([missing] if ended else [])]
            closed = len(text) if closed < 0 else closed
            calls += self.parse(text[begin:closed])
            at = closed + len(self.closing)
        return content + text[at:], calls

    def _bare(self, text: str, ended: bool) -> tuple[str, Calls]:
        stripped = text.strip()
        names = "|".join(re.escape(name) for name in self.schemas)
        if _LIST.match(stripped) is None and (not names or re.match(rf"({names})\s*\(", stripped) is None):
            return text, []
        calls = self.parse(stripped)
        if not ended and any(isinstance(call, BadCall) for call in calls):
            return "", []
        return "", calls

    def parse(self, source: str) -> Calls:
        """Return the calls of a piece of Python: one, several on lines of their own, or a list of them."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)  # such as one for the escape \\d in a text
                tree = ast.parse(source.strip())
            nodes = list(_listed(tree))
            return [self._call(node) for node in nodes] or [BadCall("the call is empty")]
        except SyntaxError as error:
            where = "" if error.offset is None else f" at character {error.offset} of line {error.lineno}"
            return [BadCall(f"the call is not Python: {error.msg}{where}")]
        except (ValueError, RecursionError, MemoryError) as error:  # a null byte; what is nested too deep for ast
            return [BadCall(f"the call is not Python: {error or 'it is nested too deep'}")]

    def _call(self, node: ast.expr) -> ToolCall | BadCall:
        if not isinstance(node, ast.Call):
            return BadCall(f"the call must be written NAME(...), got {ast.unparse(node)[:80]}")
        name = ast.unparse(node.func)
        if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", name) is None:
            return BadCall(f"the call must begin with the name of a tool, got {name[:80]}")
        order = list(self.schemas.get(name, {}))
        if name in self.schemas and len(node.args) > len(order):
            return BadCall(f"{name} takes {len(order)} arguments, got {len(node.args)}")
        arguments: dict[str, Any] = {}
        for place, value in enumerate(node.args):
            if isinstance(read := _literal(value), BadCall):
                return read
            arguments[order[place] if place < len(order) else str(place)] = read
        for keyword in node.keywords:
            if keyword.arg is None or isinstance(read := _literal(keyword.value), BadCall):
                return BadCall(f"an argument must be a value written out, got {ast.unparse(keyword.value)[:80]}")
            if keyword.arg in arguments:
                return BadCall(f"the argument {keyword.arg} is given twice")
            arguments[keyword.arg] = read
        return ToolCall(name, arguments)


def _listed(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield the calls of a module: of lists, of tuples, or each a statement."""
    for statement in tree.body:
        if not isinstance(statement, ast.Expr):
            raise ValueError(f"there are calls alone, got {ast.unparse(statement)[:80]}")
        value = statement.value
        yield from value.elts if isinstance(value, ast.List | ast.Tuple) else [value]


def _literal(node: ast.expr) -> Any:
    """Return the value of an argument that is written out; a BadCall for anything that would have to be computed."""
    try:
        return ast.literal_eval(_Words().visit(node))
    except (ValueError, TypeError):
        return BadCall(f"an argument must be a value written out, got {ast.unparse(node)[:80]}")


class _Words(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.copy_location(ast.Constant(_WORDS[node.id]), node) if node.id in _WORDS else node
