"""Tokenizer: a model with its own code needs ``trust_remote_code`` there as well."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..patching import GENERATOR, Finding, Ledger, Patch, Proxy, Sources
from ..probing import absent, at, needed, not_needed

if TYPE_CHECKING:
    from types import ModuleType


class _TrustingTokenizer(Proxy):
    """AutoTokenizer that trusts the model's code, as the generator trusts it for the config."""

    def changed(self) -> dict[str, Any]:
        return {"from_pretrained": self._trusting}

    def _trusting(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("trust_remote_code", True)
        return self.__wrapped__.from_pretrained(*args, **kwargs)


def probe(sources: Sources) -> Finding:
    generator = sources.generator
    calls = generator.calls("AutoTokenizer.from_pretrained") if generator else ()
    if generator is None or not calls:
        name = "AutoTokenizer.from_pretrained"
        return absent(sources.speculators, "data_generation.vllm_hidden_states_generator", name)
    where = at(generator, calls[0].line)
    if "trust_remote_code" in calls[0].keywords:
        return not_needed("speculators passes trust_remote_code to the tokenizer", where)
    return needed("speculators loads the tokenizer without trust_remote_code", where)


def apply(module: ModuleType, ledger: Ledger) -> None:
    ledger.proxy(module, "AutoTokenizer", _TrustingTokenizer)


PATCH = Patch(
    id="tokenizer_remote_code",
    summary="Loads the tokenizer with trust_remote_code, as config and model are loaded.",
    why="Models such as Kimi-K2.5 ship their tokenizer as code; without it the load asks at a "
    "terminal, or raises.",
    upstream="speculators/data_generation/vllm_hidden_states_generator.py, 0.3.0 and 0.4.0",
    process="driver",
    probe=probe,
    target=GENERATOR,
    apply=apply,
    removable="when speculators passes trust_remote_code to the tokenizer",
)
