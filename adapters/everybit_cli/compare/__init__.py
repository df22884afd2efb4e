"""``everybit compare``: one small language model, trained side by side under several storage policies.

``corpus`` finds the text, ``model`` is the transformer, ``training`` trains a model under each policy,
``results`` holds the records, ``report``, ``pictures`` and ``progress`` show them, ``command`` ties them together.
"""
