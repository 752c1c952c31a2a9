"""Small questions about a piece of parsed code, for looking for a change without trusting names of versions."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def in_order(node: ast.AST | None) -> Iterator[ast.AST]:
    """Every node below ``node``, in the order of the text (`ast.walk` goes by depth); none of nothing."""
    for child in ast.iter_child_nodes(node) if node else ():
        yield child
        yield from in_order(child)


def called(node: ast.AST | None) -> list[str]:
    """The last names of everything that is called, in the order of the text: ``a.b.c(x)`` is ``c``."""
    found = []
    for child in in_order(node):
        if isinstance(child, ast.Call):
            function = child.func
            found += [function.attr] if isinstance(function, ast.Attribute) else []
            found += [function.id] if isinstance(function, ast.Name) else []
    return found


def names(node: ast.AST | None) -> set[str]:
    """Every identifier in it: variables, attributes, parameters, keywords, definitions."""
    found = set()
    for child in ast.walk(node) if node else ():
        if isinstance(child, ast.Name):
            found.add(child.id)
        elif isinstance(child, ast.Attribute):
            found.add(child.attr)
        elif isinstance(child, ast.arg) or (isinstance(child, ast.keyword) and child.arg is not None):
            found.add(str(child.arg))
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(child.name)
    return found


def keywords(node: ast.AST | None, function: str) -> set[str]:
    """The names under which ``function`` is given arguments anywhere in it."""
    found = set()
    for child in ast.walk(node) if node else ():
        if isinstance(child, ast.Call) and called(ast.Expr(child))[:1] == [function]:
            found |= {keyword.arg for keyword in child.keywords if keyword.arg is not None}
    return found


def says(node: ast.AST | None, words: str) -> bool:
    """Whether a text in it (neighbouring ones joined by Python, blanks made one) holds ``words``."""
    wanted = words.lower()
    texts = [n.value for n in in_order(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return any(wanted in " ".join(text.split()).lower() for text in texts)


def fields(node: ast.AST | None) -> list[str]:
    """The annotated fields of a class."""
    body = node.body if isinstance(node, ast.ClassDef) else []
    return [s.target.id for s in body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]


def branches(node: ast.AST | None, *conditions: str) -> list[ast.If]:
    """The ``if`` statements in it whose condition mentions every one of these identifiers."""
    return [child for child in in_order(node) if isinstance(child, ast.If) and set(conditions) <= names(child.test)]


def returns(node: ast.AST, value: object) -> bool:
    """Whether it has a ``return`` of this constant."""
    return any(
        isinstance(child, ast.Return) and isinstance(child.value, ast.Constant) and child.value.value is value
        for child in ast.walk(node)
    )
