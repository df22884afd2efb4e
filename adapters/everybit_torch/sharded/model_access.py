"""Access to a stepper's model during training: state dicts, files, copies, full weights, and methods that use them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from everybit_torch.collectives.communicator import Communicator
from everybit_torch.full_precision import PIECE
from everybit_torch.sharded.agreement import Everyone
from everybit_torch.sharded.full_parameters import FullParameters, read_only
from everybit_torch.sharded.late_weights import LateWeights
from everybit_torch.sharded.layout import Layout
from everybit_torch.sharded.main_values import MainValues
from everybit_torch.sharded.model_buffers import ModelBuffers
from everybit_torch.sharded.model_parallel import ModelParallel
from everybit_torch.sharded.model_state import FORMS, ModelState, StateForm, require_form
from everybit_torch.sharded.module_buffers import BufferValues, synchronize_buffers
from everybit_torch.sharded.offload import HostCopies
from everybit_torch.sharded.passes import Passes
from everybit_torch.sharded.registered_methods import RegisteredMethods
from everybit_torch.sharded.safetensors_export import export
from everybit_torch.sharded.shard_optimizer import LabelledTransform, ShardOptimizer
from everybit_torch.sharded.staging import StagingMemory
from everybit_torch.sharded.state_loading import IncompatibleKeys, load_state
from everybit_torch.sharded.step_checks import Completeness

Modules = Sequence[nn.Module | str]


class ModelAccess:
    """The part of a stepper through which its model is read, written, copied and saved; see :class:`everybit_torch.FlatStepper`."""

    model: nn.Module
    layout: Layout
    buffers: ModelBuffers
    inner: Communicator
    outer: Communicator
    completeness: Completeness
    beside: ModelParallel
    staging: StagingMemory
    _copies: HostCopies
    _passes: Passes
    _optimizer: ShardOptimizer
    _full: FullParameters | None
    _state: ModelState
    _methods: RegisteredMethods
    _late: LateWeights | None

    def before_writing(self) -> None:
        """This rank's weights and state are written to next, by others than a step: after all copies of them."""
        self.staging.order()
        if self._copies.offload.weights:
            self._copies.synchronize()

    def loaded(self) -> None:
        """This rank's own weights were replaced: hand them out."""
        raise NotImplementedError

    @property
    def labelled(self) -> Mapping[str, LabelledTransform]:
        """The transform and policy of each label."""
        raise NotImplementedError

    def wait_for_weights(self) -> None:
        """Wait until the weights of the last step are on this rank; needed with ``overlap_param_gather=True`` only.

        Until they have arrived, weights hold the values from before the step, or a mixture. These wait by themselves: modules that
        are called, for the weights of their unit; ``state_dict()`` and ``load_state_dict()`` of the model and of its modules; and all
        methods of the stepper, such as :meth:`step`, :meth:`model_state_dict` and checkpoints.
        Copying or pickling the model is refused. Code that reads or writes parameters in other ways calls this first: averages of
        weights, constraints on them, and a module that computes with the weights of another unit without calling it.

        Raises:
            RuntimeError: Another rank died.
        """
        if self._late is not None:
            self._late.wait()

    # -- state dicts ----------------------------------------------------------------------------------------------------------------

    def model_state_dict(self, form: StateForm = "rank0") -> dict[str, Any]:
        """Copy the model's ``state_dict()`` to the host's memory, one unit after the other. Every rank has to call it.

        It has the names, shapes and dtypes of ``model.state_dict()`` before the stepper was made: tied names share a tensor, buffers and
        ignored parameters are in it, as they are on the rank that has it. DTensors are put together, and are plain tensors of the whole's
        shape. Under ``optim_grads_params`` a rank's device holds one unit beside what it keeps.

        Args:
            form: ``"rank0"``: all of it on the first rank, and an empty dict on the others. ``"full"``: all of it on every rank.
                ``"sharded"``: on every rank its own elements of each parameter, as tensors that ``torch.distributed.checkpoint`` saves and
                loads (``.local`` has the elements, 1-d, from ``.low`` on, counted through this rank's part of a DTensor); nothing is sent
                for it.

        Raises:
            RuntimeError: Inside a forward or backward pass; or ranks call something else.
            TypeError: A hook of the model's makes tensors of sharded parameters.
            ValueError: ``form`` is none of these.
        """
        require_form(form)
        self._require_between_passes("model_state_dict", form)
        if form == "sharded":
            if self._full is not None:
                self._full.keep()
            return self._state.sharded()
        everywhere = form == "full"
        return self._state.full(here=everywhere or self._everyone.is_first, everywhere=everywhere)

    def load_model_state_dict(
        self, state_dict: Mapping[str, Any] | None, *, strict: bool = True, broadcast_from_rank0: bool = False
    ) -> IncompatibleKeys:
        """Load the model's weights while they are sharded, one parameter after the other. Every rank has to call it.

        Everything is checked first, on all ranks: missing and unknown names, shapes, dtypes, shards that were cut differently, tied names
        with different values, and ranks with different tensors. All problems are in one error, which is the same on all ranks, and nothing
        is changed then. Nothing is cast. A missing name is filled in if the model ties it to one that is given.

        Tensors are whole ones, of which each rank takes its part; or shards of :meth:`model_state_dict`; or, for a DTensor, one that is
        cut alike.

        Main weights become the weights that are loaded, and residuals zero. The optimizer's moments and counts stay as they are
        (``load_sharded`` loads these too). Values of ``get_extra_state`` are handed to ``set_extra_state``; hooks of
        ``model.load_state_dict`` are not called.

        Args:
            state_dict: Whole tensors, the same on every rank; or what ``model_state_dict("sharded")`` gave, with values that
                ``torch.distributed.checkpoint`` loaded into it.
            strict: Refuse names that do not match. False: they are returned, and those parameters keep their values. Shapes and dtypes
                have to match in any case.
            broadcast_from_rank0: The first rank has whole tensors, and the others None or an empty dict.

        Returns:
            The missing and the unknown names, as torch returns them.

        Raises:
            RuntimeError: Inside a pass, a microbatch or ``full_parameters``, or with gradients of a cycle that is not over; or weights
                and state do not belong together.
            ValueError: It does not fit.
        """
        name = "load_model_state_dict"
        self._require_between_passes(name, f"strict={strict}, broadcast_from_rank0={broadcast_from_rank0}")
        self.completeness.require(name)
        if self.in_full_parameters:
            raise RuntimeError(
                f"{name}: inside full_parameters(); accepted is outside, or model.load_state_dict(...) inside."
            )
        if self._passes.in_context or self._passes.holds_gradients():
            raise RuntimeError(
                f"{name}: in the middle of a cycle, with gradients of other weights; accepted is after step() or zero_grad()."
            )
        self.before_writing()
        keys = load_state(
            self._state, self._optimizer.engine, state_dict, self._everyone,
            strict=strict, broadcast=broadcast_from_rank0,
            begin=lambda: self.completeness.mark_incomplete(f"{name} ended in an error after some of the weights were replaced"),
        )  # fmt: skip
        self.loaded()
        return keys

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """Give the model the weights for evaluation inside, as :func:`everybit_torch.evaluation_weights` does. Every rank has to call it.

        Passes without gradients, ``full_parameters``, ``model_state_dict`` and ``export_safetensors`` see them. A step is refused, and so
        is a checkpoint of weights and state together. Memory for another copy of this rank's part of the weights is taken.

        Raises:
            RuntimeError: Inside a pass, a microbatch or ``full_parameters``, or with gradients of a cycle that is not over; or weights
                and state do not belong together.
        """
        name = "evaluation_weights"
        self._require_between_passes(name, "")
        self.completeness.require(name)
        if self.in_full_parameters or self._passes.in_context or self._passes.holds_gradients():
            raise RuntimeError(
                f"{name}: inside full_parameters() or in the middle of a cycle; accepted is after step() or zero_grad()."
            )
        kept = []
        self.before_writing()
        with torch.no_grad():
            for shard in self._optimizer.shards:
                kept.append(shard.weights.own.clone())
                for stored, _, piece in self._optimizer.pieces_of(shard, PIECE):
                    (values,) = stored.eval_params([piece.tensor], piece.state)
                    piece.tensor.copy_(values)  # which goes back to the host, if it was brought from there
        self.loaded()
        self.completeness.mark_incomplete(
            "inside evaluation_weights() the model has other weights", accepted="outside of it"
        )
        try:
            yield
        finally:
            self.before_writing()
            with torch.no_grad():
                for shard, own in zip(self._optimizer.shards, kept, strict=True):
                    shard.weights.own.copy_(own)
            self.loaded()

    def export_safetensors(
        self,
        path: str | os.PathLike[str],
        *,
        max_shard_size: int | str | None = None,
        dtype: torch.dtype | None = None,
        metadata: Mapping[str, str] | None = None,
        main: bool = False,
    ) -> None:
        """Write the model's ``state_dict()`` to safetensors. Every rank has to call it; the first one writes, one unit after the other.

        No rank holds more than one unit beside what it keeps. Tied names are stored once, and the header says which they are. Files are
        written atomically. In a directory the index is removed first and written last, so that one without is not whole.

        Args:
            path: The file; or, with ``max_shard_size``, a directory, which is made if need be.
            max_shard_size: The most bytes of a file: a number, or such as ``"5GB"``; larger tensors have a file of their own. Files and
                their index have the names that ``transformers`` uses: ``model-00001-of-00003.safetensors``,
                ``model.safetensors.index.json``, or ``model.safetensors`` alone if everything fits into one.
            dtype: Floating-point tensors are converted to it; None: each has its own.
            metadata: Strings to keep in the headers.
            main: Write the weights that are trained with all the precision that parameters and state hold together, as
                ``TorchOptimizer.export_fp32`` does: in the dtype in which steps are computed, if ``dtype`` is None. What is not trained is
                written as it is. One group of parameters at a time is in memory in that dtype.

        Raises:
            OSError: The first rank cannot write; every rank raises it, with the reason.
            RuntimeError: Inside a forward or backward pass; or ranks call something else.
            TypeError: The model's state has something that the format does not store; the message names it.
            ValueError: ``max_shard_size`` is not a size, or ``dtype`` not a floating-point dtype.
        """
        self._require_between_passes("export_safetensors", f"{max_shard_size!r}, {dtype}, main={main}")
        values = None
        if main:
            self.completeness.require("export_safetensors")
            values = MainValues(self._optimizer, self.buffers, self.labelled)
        export(
            self._state,
            path,
            self._everyone,
            max_shard_size=max_shard_size,
            dtype=dtype,
            metadata=metadata,
            main=values,
        )

    def copy_model(self, form: StateForm = "rank0") -> nn.Module | None:
        """Return a plain copy of the model, with all its weights, in the host's memory. Every rank has to call it.

        The copy has no hooks of the stepper, and may be trained, averaged or pickled. DTensors are plain tensors in it, and it has no
        hooks of ``parallelize_module``. Memory is as for :meth:`model_state_dict`.

        Args:
            form: ``"rank0"``: on the first rank, and None on the others. ``"full"``: on every rank.

        Raises:
            RuntimeError: Inside a forward or backward pass; or ranks call something else.
            ValueError: ``form`` is none of these.
        """
        require_form(form, FORMS[:2])
        self._require_between_passes("copy_model", form)
        everywhere = form == "full"
        return self._state.copy(here=everywhere or self._everyone.is_first, everywhere=everywhere)

    def own_state_dict(self) -> dict[str, Any]:
        """The model's ``state_dict()``, where tensors of sharded parameters have no values. For checkpoints, which know."""
        return {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in self._state.named().items()}

    # -- weights as a whole ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def full_parameters(self, modules: Modules | None = None, *, writeback: bool = True) -> Iterator[nn.Module]:
        """Context in which the model has all weights on every rank, to inspect, evaluate or save. What is written to them is kept.

        Every rank has to enter it. DTensors stay DTensors: they hold this rank's part, and ``full_tensor()`` returns the whole.

        Args:
            modules: Modules of the model, or their names: the units that contain their parameters are gathered. None: all.
            writeback: Keep what is written. False, for reading only: nothing is copied back, and writing to weights, or stepping, raises
                an error at the end.

        Raises:
            RuntimeError: Inside a backward pass.
            TypeError: ``modules`` has something that is neither a module nor a name.
            ValueError: ``modules`` has something that is not in the model.
        """
        if self._passes.in_pass:
            raise RuntimeError("full_parameters: inside a backward pass; accepted is outside.")
        self.wait_for_weights()
        units, parameters = self._units_of(modules)
        if writeback:
            self.before_writing()
        with (
            nullcontext() if writeback else read_only(parameters),
            nullcontext() if self._full is None else self._full.show(units, writeback=writeback),
        ):
            yield self.model

    @property
    def in_full_parameters(self) -> bool:
        """Whether weights are shown, inside :meth:`full_parameters`."""
        return self._full is not None and self._full.shown

    def register_method(self, module: nn.Module, name: str) -> None:
        """Gather weights while a method of a module runs, as they are while ``forward`` does: ``register_method(model, "generate")``.

        The weights that the module itself computes with are gathered while the method runs; units inside it are gathered when it calls
        them. A loss may be computed from the result. Every rank has to call the method, equally often.

        Under strategies that do not shard weights it has no effect.

        Args:
            module: The model or one of its modules.
            name: The name of a method; no generator, and not asynchronous. On copies of the model it is a plain method.

        Raises:
            ValueError: Not a module of the model, or not such a method of it.
        """
        self._methods.register(module, name)

    def synchronize_buffers(self, values: BufferValues = "first") -> None:
        """Make the model's buffers, such as running statistics, the same on all ranks. Every rank has to call it.

        Args:
            values: ``"first"``: those of the first rank. ``"mean"``: the mean over the ranks, computed in float64 in the order of the
                ranks and rounded once; buffers that are not floating-point are the first rank's.

        Raises:
            ValueError: ``values`` is none of the two.
        """
        synchronize_buffers(self.model, (self.outer, self.inner), values)

    # -- helpers --------------------------------------------------------------------------------------------------------------------

    @property
    def _everyone(self) -> Everyone:
        return Everyone(*reversed(self.beside.of_tensors), self.inner, self.outer)

    def _require_between_passes(self, name: str, arguments: str) -> None:
        """Refuse what cannot be done now, or is not done by all ranks alike.

        Raises:
            RuntimeError: Inside a pass; or other ranks do something else.
        """
        problem = None
        if self._passes.in_pass or self._passes.in_forward:
            problem = f"{name}: inside a forward or backward pass, or after one that ended in an error; accepted is between passes."
        if problem is None:
            self.wait_for_weights()
        gathered = "" if self._full is None else self._full.gathered
        self._everyone.require_same_call(f"{name}({arguments})", gathered, problem)

    def _units_of(self, modules: Modules | None) -> tuple[set[int] | None, list[tuple[str, nn.Parameter]]]:
        """The units in which the parameters of some modules lie; and all parameters of these units."""
        if modules is None:
            return None, list(self._state.parameters.items())
        if isinstance(modules, (str, nn.Module)):
            raise TypeError(
                f"modules: got {modules!r}; accepted is a list of modules of the model, and names of modules."
            )
        known = dict(self.model.named_modules(remove_duplicate=False))
        unit_of = {name: unit for unit, names in enumerate(self._state.members) for name in names}
        by_id = {id(parameter): name for name, parameter in self._state.parameters.items()}
        units: set[int] = set()
        for one in modules:
            module = known.get(one) if isinstance(one, str) else one
            if module is None or (
                isinstance(module, nn.Module) and all(module is not other for other in known.values())
            ):
                what = repr(one) if isinstance(one, str) else f"a {type(one).__name__}"
                raise ValueError(
                    f"modules: got {what}, which is not in the model; accepted are modules of it, and names of modules."
                )
            if not isinstance(module, nn.Module):
                raise TypeError(f"modules: got {one!r}; accepted are modules of the model, and names of modules.")
            units |= {unit_of[by_id[id(p)]] for p in module.parameters() if id(p) in by_id}
        shown = [(name, self._state.parameters[name]) for unit in sorted(units) for name in self._state.members[unit]]
        return units, shown
