"""The clauses of the contract by number, as docs/contract.md titles them.

A number is never used again for something else. A test keeps this table, the document, and the
checks that cite clauses in step, both ways.
"""

from __future__ import annotations

CLAUSES: dict[str, str] = {
    # shapes, dtypes, layouts
    "S1": "linear returns base(x) plus the delta, [T', N], in the dtype of the base's output",
    "S2": "packed slices: each has its own width, rank and scaling, and its own rows of A and B",
    "S3": "shrink returns float32 [T', n_slices, R]; entries past a rank, of NO_LORA rows and of padding "
    "are unspecified, and expand never reads them",
    "S4": "expand adds in place into out, and returns out itself",
    "S5": "x and out may be strided by rows and begin at any element; a and b may be strided by slots",
    "S6": "allocate_weights gives tensors of the contract's shapes, every rank 0",
    "S7": "rows past the batch's are padding, treated as NO_LORA",
    "S8": "index arithmetic is 64-bit wherever a product of slot or row passes 2^31 elements",
    "S9": "results are fresh tensors: never a view of scratch, static storage, or an input",
    "S10": "weights are read anew by every op: a slot rewritten in place between ops is seen",
    # inputs and memory
    "I1": "inputs are never written: x, ids, h, weights",
    "I2": "nothing is written outside the result",
    "I3": "scratch may be overwritten at any time between ops, sync is all zero between ops",
    "I4": "uninitialised memory never reaches a result",
    # batch state
    "B1": "batch_info is what prepare_batch returned, and None before the first and after every reset",
    "B2": "batch_info is the only per-batch state; other memory stays in the homes of the workspace",
    "B3": "prepare_batch and reset_batch_state are overridden together or not at all",
    "B4": "reset is idempotent, legal before the first prepare, and leaves an instance like a new one",
    "B5": "a failing prepare leaves no batch",
    "B6": "an op without a prepared batch raises NoBatchPreparedError and names the op",
    "B7": "a failing op leaves the batch, and every tensor, as it was",
    "B8": "BatchInfo has one entry per request, empty ones included, whatever segments a backend cuts",
    "B9": "a batch depends on nothing that was prepared or run before it",
    "B10": "an earlier batch's metadata is not overwritten while its copy is under way",
    "B11": "a prepared batch does not follow later changes of the engine's lists",
    # layers
    "L1": "a layer is active exactly while it has weights and a batch is prepared",
    "L2": "an inactive layer is the base module; a forward that nobody prepared is refused",
    # values
    "V1": "linear, shrink and expand are within twice plain torch's error of the float64 result",
    "V2": "embedding adds scaling * B @ A[slot, id]",
    "V3": "lm_head covers the rows of one logits pass",
    "V4": "output_scale: y = output_scale * (base without bias + delta) + bias",
    "V5": "bias: an adapter's own bias is added to the rows of its slot",
    "V6": "full: an adapter's whole weight replaces the base's for the rows of its slot",
    "V7": "scales: a factor per request on the delta",
    "V8": "dots accumulate in float32, and float32 dots are IEEE, not tf32",
    "V9": "verify batches are batches of several rows per request",
    # neighbours
    "N1": "other requests' values, NaNs, ranks and adapters change no bit of a request's rows",
    "N2": "NO_LORA rows are the base's own, bit for bit",
    "N3": "rank 0, empty segments and absent modules change no bit, not even the sign of zero",
    "N4": "what lies in unused slots, unused ranks and padded rows never reaches a live row",
    "N5": "batch_invariant: shrink, and expand into a given out, give a request the same bits in any batch",
    "N6": "a request's result is the same within rounding in any batch",
    "N7": "deterministic: the same call twice gives the same bits",
    "N8": "the order of calls changes nothing",
    "N9": "a B of zeros changes no value",
    # capabilities
    "C1": "what is claimed works over its whole claimed range",
    "C2": "what is not claimed raises UnsupportedOpError, naming backend, op, limit and value",
    "C3": "name, contract and capabilities are class attributes; load_backend(name) gives a usable instance",
    "C4": "overrides have the contract's parameters: tensors first, the rest keyword-only",
    # errors
    "E1": "fewer rows than the batch, or a logits pass that does not exist, raise BatchMismatchError",
    "E2": "tensors that do not fit in shape, dtype or device raise TensorMismatchError",
    "E3": "a batch that contradicts itself raises InvalidBatchError where it is made",
    # graphs
    "G1": "a graph batch without init_graph, or larger than it, raises GraphNotInitializedError",
    "G2": "prepare_batch(graph=...) fills static buffers in place and changes no address",
    "G3": "a graph captured with any batch serves every later one that fits",
    "G4": "a graph captured without an adapter applies those of later batches",
    "G5": "after a reset a stray replay adds nothing",
    "G6": "static request buffers past the batch are empty: indptr is T, slots are NO_LORA",
    "G7": "a captured graph sees weights, ranks and scalings that are rewritten in place",
    "G8": "reset keeps static buffers, and a captured graph refers to no memory that may be freed",
    # running
    "R1": "preparing and ops never synchronise with the device",
    "R2": "instances share nothing: two batches may be alive at once on two instances",
    # experts
    "X1": "experts: gate_up adds scaling * B @ A @ x of each pair's slot and expert into out [T, k, N], slice by slice",
    "X2": "experts: down adds the same into out [T, k, H], times the routing weight if asked, or their weighted sum over a row's pairs into [T, H]",
    "X3": "experts: with accumulate=False out is overwritten, zero where there is no delta",
    "X4": "experts: ids of -1 or out of range, and slots of NO_LORA or out of range, get no delta and read no weight",
    "X5": "experts: an expert_map turns global ids into this rank's, or into none",
    "X6": "experts: a matrix that all experts share gives the bits of that matrix repeated",
    "X7": "experts: x, ids, routing weights, slots and adapters are never written",
    "X8": "experts: other rows' values, NaNs, adapters and experts change no bit of a row",
    "X9": "experts: rows without a delta keep their bits; what lies past a rank, in unused slots or in fresh memory reaches no result",
    "X10": "experts: deterministic: the same call gives the same bits, from any route of the same routing",
    "X11": "experts: a graph captured with any routing follows the ids, slots, weights and ranks it finds when replayed",
    "X12": "experts: route and ops never synchronise, and read nothing on the host",
    "X13": "experts: tensors that do not fit raise TensorMismatchError, claims exceeded raise UnsupportedOpError, and out stays as it was",
    "X14": "experts: one route serves both projections, any number of times, and an instance holds no state of a batch",
    "X15": "experts: slots times experts has no limit but memory",
    "X16": "experts: allocate_weights gives tensors of the contract's shapes, every rank 0",
    "X17": "experts: row_slots gives each row the slot of its request, from the request view alone",
}
