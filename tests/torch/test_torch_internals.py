"""Private interfaces of torch: each is named here, so that a torch without it is told by name, and each has one place."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from everybit_torch.torch_internals import compiler, light_optimizer, tensors

SOURCE = Path(__file__).parents[2] / "adapters/everybit_torch"

# module, what it has, and who looks for it.
USED = [
    ("torch", "_foreach_norm", "tensors"),
    ("torch", "_amp_foreach_non_finite_check_and_unscale_", "tensors"),
    ("torch", "Tensor._version", "tensors"),
    ("torch", "Tensor._make_wrapper_subclass", "tensors"),
    ("torch", "UntypedStorage._cdata", "tensors"),
    ("torch._C", "DisableTorchFunctionSubclass", "tensors"),
    ("torch._C", "_storage_Use_Count", "tensors"),
    ("torch._C", "_nn.flatten_dense_tensors", "tensors"),
    ("torch._C", "_current_graph_task_id", "autograd"),
    ("torch.autograd", "Variable._execution_engine.queue_callback", "autograd"),
    ("torch._compile", "_disable_dynamo", "light_optimizer"),
    ("torch._compile", "_disable_dynamo", "tracing"),
    ("torch._dynamo", "maybe_mark_dynamic", "compiler"),
    ("torch._dynamo.exc", "FailOnRecompileLimitHit", "compiler"),
    ("torch._dynamo.variables.builder", "SourcelessBuilder._type_handlers", "compiler"),
    ("torch._dynamo.variables.builder", "UserDefinedObjectVariable", "compiler"),
    ("torch._inductor.compile_fx", "compile_fx", "compiler"),
    ("torch._inductor.config", "post_grad_custom_post_pass", "compiler"),
    ("torch._inductor.config", "cpp.vec_isa_ok", "compiler"),
    ("torch._inductor.config", "cpp.dynamic_threads", "compiler"),
    ("torch._inductor.config", "cpp.enable_floating_point_contract_flag", "compiler"),
    ("torch._inductor.config", "cpp.enable_unsafe_math_opt_flag", "compiler"),
    ("torch._inductor.cpp_builder", "get_cpp_compiler", "compiler"),
    ("torch._inductor.cpu_vec_isa", "x86_isa_checker", "compiler"),
    ("torch._inductor.cpu_vec_isa", "supported_vec_isa_list", "compiler"),
    ("torch._inductor.cpu_vec_isa", "valid_vec_isa_list", "compiler"),
    ("torch._inductor.cpu_vec_isa", "VecISA.check_build", "compiler"),
    ("torch._inductor.cpu_vec_isa", "VecISA.build_arch_flags", "compiler"),
    ("torch._inductor.custom_graph_pass", "CustomGraphPass", "scalars_first"),
    ("torch._inductor.custom_graph_pass", "get_hash_for_files", "scalars_first"),
    ("torch._ops", "OpOverload", "scalars_first"),
    ("torch", "ops._inductor_test.realize.default", "scalars_first"),
    ("torch._inductor.config", "get_config_copy", "device_options"),
    ("torch._inductor.config", "emulate_precision_casts", "device_options"),
    ("torch._inductor.config", "eager_numerics.division_rounding", "device_options"),
    ("torch._inductor.config", "eager_numerics.disable_ftz", "device_options"),
    ("torch._inductor.config", "aggressive_fusion", "device_options"),
    ("torch._inductor.config", "score_fusion_memory_threshold", "device_options"),
    ("torch._inductor.config", "loop_ordering_after_fusion", "device_options"),
    ("torch._inductor.sizevars", "SizeVarAllocator.statically_known_multiple_of", "compiler"),
    ("torch._inductor.virtualized", "V", "cpp_vectors"),
    ("torch._inductor.codegen.cpp", "CppVecOverrides.to_dtype_bitcast", "cpp_vectors"),
    ("torch._inductor.codegen.cpp", "CppVecOverrides.to_dtype", "cpp_vectors"),
    ("torch._inductor.codegen.cpp", "CppVecKernel.arange", "cpp_vectors"),
    ("torch._inductor.codegen.cpp", "CppVecKernel._get_vec_load_line", "cpp_vectors"),
    ("torch._inductor.codegen.cpp", "CppVecKernel._get_store_line", "cpp_vectors"),
    ("torch._inductor.codegen.cpp", "CppVecKernel._get_vec_type", "cpp_vectors"),
    ("torch._inductor.codegen.cpp", "CppVecKernel._get_num_vectors", "cpp_vectors"),
    ("torch._inductor.codegen.cpp", "CppVecKernel._try_get_const_stride", "cpp_vectors"),
    ("torch._inductor.codegen.cpp", "VECTORIZABLE_DTYPES", "cpp_vectors"),
    ("torch._inductor.codegen.cpp", "get_loop_body_lowp_fp", "cpp_vectors"),
    ("torch._inductor.codegen.cpp", "KernelGroup.codegen_group", "cpp_vectors"),
    ("torch._inductor.codecache", "PyCodeCache.load_by_key_path", "kernel_calls"),
    ("torch.distributed.fsdp._fully_shard._fsdp_api", "ReduceScatter", "fsdp"),
    ("torch.distributed.tensor._utils", "compute_local_shape_and_global_offset", "dtensors"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo", "pickles"),
    ("torch.serialization", "_get_layout", "pickles"),
    ("torch.distributed.distributed_c10d", "_get_default_store", "process_groups"),
    ("torch.distributed", "ProcessGroup._get_backend", "process_groups"),
    ("torch.distributed.distributed_c10d", "_process_group_name", "process_groups"),
]

# Where torch's schedulers, scalers and DTensors keep an attribute, which no class declares.
ATTRIBUTES = [
    ("torch.optim.lr_scheduler", "_opt_called"),
    ("torch.amp.grad_scaler", "_step_supports_amp_scaling"),
    ("torch.distributed.tensor._api", "_local_tensor"),
]

PRIVATE = re.compile(
    r"torch\.(?!__version__)(?:\w+\.)*_\w+|\._local_tensor|\._cdata|\._version\b|\._execution_engine|\._opt_called|_step_supports_amp\w*|"
    r"distributed_c10d\._|\._get_backend"
)
# `torch.utils._pytree` and `torch.utils._python_dispatch` have no public name, and torch's documentation uses them.
DOCUMENTED = re.compile(r"torch\.utils\._py\w+")
# A warning names a setting of the compiler's that has no public name.
NAMED_IN_TEXT = {"compiled/variants.py"}


def test_torch_has_what_is_used_of_its_inside() -> None:
    for module, name, by in USED:
        found: Any = import_module(module)
        for part in name.split("."):
            assert hasattr(found, part), f"{module}.{name} is gone; it is used in everybit_torch.torch_internals.{by}"
            found = getattr(found, part)


@pytest.mark.skipif(torch.__version__ >= "2.12", reason="newer torch compares classes without it")
def test_torch_2_11_has_the_rule_by_which_dynamo_compares() -> None:
    assert hasattr(import_module("torch._dynamo.polyfills"), "cmp_eq")


@pytest.mark.parametrize(("module", "name"), ATTRIBUTES)
def test_torch_still_reads_the_attributes_that_are_set_for_it(module: str, name: str) -> None:
    file = import_module(module).__file__
    assert file is not None
    assert name in Path(file).read_text(encoding="utf-8")


def test_torchs_inside_is_used_in_one_package() -> None:
    users = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if path.relative_to(SOURCE).parts[0] != "torch_internals"
        and PRIVATE.search(DOCUMENTED.sub("", path.read_text(encoding="utf-8")))
    }
    assert users == NAMED_IN_TEXT


def test_without_torchs_own_flattening_the_elements_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [torch.arange(6.0).view(2, 3), torch.ones(()), torch.empty(0)]
    expected = tensors.flatten(parts)
    monkeypatch.delattr(torch._C._nn, "flatten_dense_tensors")
    assert torch.equal(tensors.flatten(parts), expected)


def test_a_method_that_others_have_wrapped_is_called_as_they_wrapped_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    before = torch.optim.Optimizer.zero_grad

    def wrapped(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        calls.append(set_to_none)
        before(self, set_to_none)

    monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", wrapped)
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    light_optimizer.LightOptimizer([parameter], {}).zero_grad()
    assert calls == [True]
    gradient: Tensor | None = parameter.grad
    assert gradient is None


def test_a_length_that_a_guard_calls_a_multiple_is_known_as_one() -> None:
    """Inductor of torch 2.11 does not know it by itself, and threads of a GPU then load elements one by one."""
    from torch._inductor.sizevars import SizeVarAllocator
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    compiler.know_multiples()
    environment = ShapeEnv()
    context: Any = StatelessSymbolicContext([DimDynamic.DYNAMIC])
    length: Any = FakeTensorMode(shape_env=environment).from_tensor(torch.empty(64), symbolic_context=context).shape[0]
    lengths: Any = SizeVarAllocator(environment)
    assert not lengths.statically_known_multiple_of(length.node.expr, 16)
    assert length % 16 == 0
    assert lengths.statically_known_multiple_of(length.node.expr, 16)
    assert not lengths.statically_known_multiple_of(length.node.expr, 32)
