"""The stepper's cycle as data: which events follow what autograd does. Nothing here knows a tensor or sends anything.

A *signal* is what autograd, a module's hook or the user's code does next: a forward pass begins, a gradient arrives, a step is asked for.
:class:`~.schedule.Schedule` answers each signal with the *events* that follow it, in order. The executor carries them out on buffers; a
plan adds up their bytes.
"""
