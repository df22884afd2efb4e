"""Every policy that the documentation shows."""

from __future__ import annotations

from typing import assert_type

import everybit as eb

policy = eb.Policy(
    params=eb.Split(16),
    momentum=eb.Nearest("bfloat16"),
    variance=eb.Stochastic("bfloat16"),
    slots={"mean": eb.Kahan("float16", "stochastic")},
    grads=eb.Grads(main="float32", comm="bfloat16", reduce="float32"),
)
by_label = eb.by_label(
    lambda path, p: "matrix" if p.ndim > 1 else "vector",
    {"matrix": eb.policies.LEAN_BF16, "vector": eb.Policy(params=eb.Master())},
)
one = eb.with_policy(eb.lion(1e-4), policy, seed=3)
other = eb.with_policy(eb.sgd(eb.cosine_decay_schedule(0.1, 100), momentum=0.9), by_label, unsafe="warn")
measured = eb.with_metrics(one)
assert_type(policy.bytes_per_param(), float)
assert_type(policy.bytes_table(slots=("momentum",)), dict[str, float])
