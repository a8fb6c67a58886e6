"""A rehearsal: the real generator, in this environment, on a miniature of a model.

``miniature`` and ``layers`` make the config, without torch or transformers; ``weights`` and
``loader`` make random weights; ``engine`` starts the generator; ``checks`` judges what it
returns; ``stage`` does all of that in a process of its own, which ``process`` starts, watches
and ends; ``report`` prints.
"""
