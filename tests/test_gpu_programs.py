"""The project's own decode dispatch and update of a Llama-3.1-8B-shaped model, compiled for H200s that are not here.

Needs the CUDA plugin, no GPU. Depth is cut where the program repeats its layers (decode), and whole where it is a loop
over them (training); widths, vocabulary and mesh are the real ones. `python -m jaxrl_llm.bench.gpu_programs` compiles
all of it.
"""

import functools
import math
import re

import jax
import jaxtyping
import pytest

from jaxrl_kernels import gpu_compile
from jaxrl_llm.bench import gpu_programs
from jaxrl_llm.bench.gpu_programs import LLAMA_8B, MESHES, operations

MISSING = gpu_compile.missing()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

LAYERS = 2  # of decode
SLOTS, CONTEXT = 64, 4096
ROW_TOKENS = 5120  # a number that no other dimension has
MEMORY = 141e9  # bytes of an H200
# Beside what the compiler counts: CUDA's context, NCCL's and the products' workspaces, what the allocator can't use.
MARGIN = 0.9
MOVES = {"copy", "gather", "dynamic-slice", "transpose", "all-gather", "all-reduce", "all-to-all", "reduce-scatter"}
COLLECTIVES = {"all-gather", "all-reduce", "all-to-all", "reduce-scatter", "collective-permute"}
HOST = "S(5)"  # as XLA writes the memory of an array that is the host's
EIGHT = [name for name in MESHES if name != "1"]


@functools.cache
def decode(mesh_name):
    # Devices of a tensor group have a part of each page: as many more tokens make pools of the same bytes everywhere.
    context = CONTEXT * MESHES[mesh_name].tensor
    program = functools.partial(
        gpu_programs.decode_program, mesh=gpu_programs.gpu_mesh(MESHES[mesh_name]), num_slots=SLOTS, context=context
    )
    return program(LLAMA_8B), program(gpu_programs.with_layers(LAYERS)).compile()


@functools.cache
def training(mesh_name, moments_on_host=False):
    # Annotations are not checked here: jax builds `Rows` of its own records about arguments, which are no arrays.
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        mesh = gpu_programs.gpu_mesh(MESHES[mesh_name])
        program = gpu_programs.training_program(LLAMA_8B, mesh, row_tokens=ROW_TOKENS, moments_on_host=moments_on_host)
        return program, None if mesh_name == "1" and not moments_on_host else program.compile()
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize("mesh_name", MESHES)
def test_decode_reads_pages_where_they_are(mesh_name):
    """The attention of every layer is the kernel, pools are updated in place, and nothing as large as a pool is moved.

    Caught: the attention under XLA's partitioning (`auto` refused, or `xla` and its gathers); pools not donated; pages
    not split over the tensor axis.
    """
    program, report = decode(mesh_name)
    assert report.kernels == ("triton",) * LAYERS
    pool = program.arguments[1][0][0]
    local = math.prod(pool.sharding.shard_shape(pool.shape))
    assert local == (SLOTS + 1) * CONTEXT // 16 * 16 * LLAMA_8B.num_kv_heads * 128
    aliases = re.search(r"input_output_alias=\{(.*)\}, entry_computation_layout", report.text)
    assert aliases is not None and len(re.findall(r"(?:may|must)-alias", aliases[1])) == 2 * LAYERS
    logits = SLOTS * LLAMA_8B.vocab_size
    assert all(operation.largest <= logits < local / 8 for operation in operations(report.text, MOVES))
    assert report.temporary_bytes < 2 * local


@pytest.mark.parametrize("mesh_name", MESHES)
def test_decode_fits(mesh_name):
    """Arguments of all layers by their shapes; temporaries don't grow with layers, which run one after the other."""
    program, report = decode(mesh_name)
    cut = gpu_programs.decode_program(
        gpu_programs.with_layers(LAYERS),
        gpu_programs.gpu_mesh(MESHES[mesh_name]),
        num_slots=SLOTS,
        context=CONTEXT * MESHES[mesh_name].tensor,
    )
    assert report.argument_bytes == pytest.approx(cut.argument_bytes, rel=1e-3)
    assert program.argument_bytes + report.temporary_bytes < MARGIN * MEMORY


@pytest.mark.parametrize("weight_dtype", ["int8", "float8"])
def test_decode_with_8_bit_weights_makes_no_copy_of_them(weight_dtype):
    """Matrices are half as large and converted where a product reads them: no more temporaries than in bfloat16, which
    one converted matrix of the MLP would more than double.

    Caught: the conversion taken out of the decode loop.
    """
    _, whole = decode("1")
    mesh = gpu_programs.gpu_mesh(MESHES["1"])
    config = gpu_programs.with_layers(LAYERS)
    program = gpu_programs.decode_program(config, mesh, num_slots=SLOTS, context=CONTEXT, weight_dtype=weight_dtype)
    report = program.compile()
    matrices = LAYERS * LLAMA_8B.hidden_size * (3 * LLAMA_8B.intermediate_size + 2 * LLAMA_8B.hidden_size)
    assert whole.argument_bytes - report.argument_bytes > matrices  # of the k and v projections, less the scales, more
    assert report.temporary_bytes < 1.1 * whole.temporary_bytes
    assert 2 * LLAMA_8B.hidden_size * 2 * LLAMA_8B.intermediate_size > whole.temporary_bytes


@pytest.mark.parametrize("mesh_name", EIGHT)
def test_decode_sends_activations_only(mesh_name):
    """Two sums a layer, that of the embedding, and the logits' gather: what tensor parallelism needs.

    Caught: a sampler over the split vocabulary (dozens of collectives).
    """
    _, report = decode(mesh_name)
    sent = operations(report.text, COLLECTIVES)
    activations = [(op.kind, op.dtype, op.largest) for op in sent if op.dtype != "s32"]
    sums = [("all-reduce", "bf16", SLOTS * LLAMA_8B.hidden_size)] * (2 * LAYERS + 1)
    assert sorted(activations) == sorted([*sums, ("all-gather", "f32", SLOTS * LLAMA_8B.vocab_size)])
    counts = [op for op in sent if op.dtype == "s32"]  # of active rows; and at the end, all tokens to all processes
    assert all(op.largest <= 8 * SLOTS * 100 for op in counts)
    assert bool(counts) == (MESHES[mesh_name].fsdp > 1)


@pytest.mark.parametrize("mesh_name", EIGHT)
def test_training_fits(mesh_name):
    """All 32 layers, rows of 5,120 tokens. Caught: layers that keep their activations (remat ``none``)."""
    program, report = training(mesh_name)
    assert report.argument_bytes == pytest.approx(program.argument_bytes, rel=1e-3)
    assert report.argument_bytes + report.temporary_bytes < MARGIN * MEMORY
    parameters = sum(leaf.size for leaf in jax.tree.leaves(gpu_programs.Decoder(LLAMA_8B).abstract_params()))
    # Gradients in float32 and weights in bfloat16 over eight devices; the layers' inputs, at most whole on each; and
    # room for one layer and one chunk of logits.
    expected = 6 * parameters / 8 + 2 * LLAMA_8B.num_layers * ROW_TOKENS * LLAMA_8B.hidden_size
    assert expected < report.temporary_bytes < expected + 6e9


@pytest.mark.parametrize("mesh_name", EIGHT)
def test_training_has_no_matrix_of_tokens(mesh_name):
    """Caught: attention by one softmax over the row (``reference``)."""
    _, report = training(mesh_name)
    shapes = {tuple(int(n) for n in dims.split(",")) for dims in re.findall(r"\w\[([\d,]+)\]", report.text)}
    assert not [shape for shape in shapes if shape.count(ROW_TOKENS) > 1]
    assert any(ROW_TOKENS in shape for shape in shapes)


def test_training_gathers_weights_in_bfloat16():
    """fsdp gathers a layer at a time, in the compute dtype. Caught: weights that are not cast."""
    _, report = training("fsdp 4 x tensor 2")
    sent = [operation for operation in operations(report.text, COLLECTIVES) if operation.largest > 1 << 20]
    assert {operation.dtype for operation in sent if operation.kind == "all-gather"} == {"bf16"}
    assert not {operation.kind for operation in sent} & {"all-to-all", "collective-permute"}
    one_layer = LLAMA_8B.hidden_size * LLAMA_8B.intermediate_size // 2
    table = LLAMA_8B.hidden_size * LLAMA_8B.vocab_size // 2
    assert {op.largest for op in sent if op.kind == "all-gather" and op.largest > one_layer} == {table}


def test_training_on_one_device_can_not_fit():
    """Said by shapes alone: float32 parameters and moments, a float32 gradient, weights in bfloat16."""
    program, _ = training("1")
    parameters = sum(leaf.size for leaf in jax.tree.leaves(program.arguments[0].params))
    assert parameters == 8_030_261_248
    assert 12 * parameters < program.argument_bytes < 12 * parameters * 1.01
    assert program.argument_bytes < MEMORY < program.argument_bytes + 6 * parameters


def test_training_on_one_device_fits_with_moments_on_the_host():
    """All 32 layers: both moments are arguments in the host's memory, written in place, and come to the device a layer
    at a time: what is there at most is what the backward pass needs.

    Caught: all moments fetched before the step.
    """
    program, report = training("1", moments_on_host=True)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(program.arguments[0].params))
    assert report.host_argument_bytes == pytest.approx(8 * parameters, rel=1e-6)
    assert report.argument_bytes == pytest.approx(4 * parameters, rel=1e-2)
    assert report.argument_bytes == pytest.approx(program.argument_bytes, rel=1e-6)
    # Gradients in float32, added up; weights and one row's gradients in bfloat16; and as above the layers' inputs, a
    # layer and a chunk of logits.
    expected = 8 * parameters + 2 * LLAMA_8B.num_layers * ROW_TOKENS * LLAMA_8B.hidden_size
    assert expected < report.temporary_bytes < expected + 3e9
    assert report.argument_bytes + report.temporary_bytes < 125e9 < MARGIN * MEMORY
    one_layer = LLAMA_8B.hidden_size * LLAMA_8B.intermediate_size
    table = LLAMA_8B.hidden_size * LLAMA_8B.vocab_size
    moves = [line.split("-start(")[0] for line in report.text.splitlines() if HOST in line and "-start(" in line]
    shapes = [shape for move in moves for shape in re.findall(r"f32\[([\d,]+)\]\{([^}]*)\}", move)]
    pieces = {math.prod(int(n) for n in dims.split(",")) for dims, layout in shapes if HOST not in layout}
    assert max(size for size in pieces if size != table) == one_layer  # the embedding and the output are whole


def test_auto_is_the_kernel_and_says_why(caplog):
    caplog.set_level("INFO")
    gpu_programs.decode_program(gpu_programs.with_layers(1), gpu_programs.gpu_mesh(MESHES["tensor 8"]))
    assert "Attention of decode: pallas_triton (NVIDIA H200: " in caplog.text
    caplog.clear()
    narrow = gpu_programs.dataclasses.replace(gpu_programs.with_layers(1), head_size=24)
    gpu_programs.decode_program(narrow, gpu_programs.gpu_mesh(MESHES["1"]))
    assert "Attention of decode: xla (NVIDIA H200: 'pallas_triton' needs a head size" in caplog.text
