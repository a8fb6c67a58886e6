"""A rehearsal: the real generator, in this environment, on a miniature of a model.

``files`` finds and copies config and tokenizer; ``layers`` and ``miniature`` make the config small,
without torch or transformers; ``weights`` has transformers make random weights and the reference,
``loader`` and ``parameters`` make weights inside vLLM; ``engine`` starts the generator; ``checks``
judges what it returns; ``stage`` does all of that in a process of its own, which ``process``
starts, watches and ends; ``report`` prints.
"""
