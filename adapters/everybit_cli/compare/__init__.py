"""``everybit compare``: one small language model, trained side by side under several storage policies.

``corpus`` finds the text, ``model`` is the transformer, ``training`` trains one model under one policy, ``experiment`` trains them all,
``results`` holds the records, ``report``, ``pictures`` and ``progress`` show them, ``command`` ties them together.
"""
