"""The private parts of torch that everybit uses, under plain names, each checked before it is used.

Everything that reaches into a private interface of torch is below this package, one module for each area of torch. Where torch has a
slower or narrower way that is public, it is taken when the private part is missing; the docstring says which.
"""
