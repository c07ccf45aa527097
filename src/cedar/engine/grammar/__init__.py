"""Grammars: answers that follow a JSON schema, an expression or the form of tool calls.

Needs the package ``llguidance`` (the extra ``serve``). The rest of the engine knows only
`cedar.engine.sampler.TokenMask`.
"""

from cedar.engine.grammar.factory import GrammarFactory
from cedar.engine.grammar.mask import GrammarMask

__all__ = ["GrammarFactory", "GrammarMask"]
