"""Which way of spreading a model over devices is right here, how fast is each, and what holds the machine back?

``run.py`` leaves these tables in the result; a row of a strategy that did not run has only its identity, ``status`` and ``reason``.

``strategies``: one row per (model, strategy, layout, world): key (unique, names the row in the other tables), model, strategy, data,
    tensor, pipeline, context, world, batch_size (global), seq_len, micro_batches, schedule, precision, checkpointing, compile,
    parameters, step_s (median of the slowest rank), step_ci_low, step_ci_high, n, forward_s, backward_s, optimizer_s, data_s (means
    over ranks, medians over steps; a pipeline's schedule is one: backward_s holds it and forward_s is None), comm_s (busy,
    mean over ranks), comm_hidden_share, bubble_s (of the slowest step's ranks: idle time in the schedule, mean), samples_per_s,
    tokens_per_s, flops (of a step, all ranks), mfu, peak_bytes (list per rank: growth of the process or device memory; empty where
    nobody counts it), counted_parameters (held by all ranks, each shard once), compute_s (of a rank while all compute, measured without
    exchanges), predicted_step_s, unpredicted (why these two are None), status (ok, skipped), reason, and against the single-device run:
    fp64 (whether the device has it), loss_error, weight_error (fp64), loss_error_fp32, gradient_error (fp32).
``kernels``: key, class (matmul, attention, elementwise, communication, copy, optimizer, other), time_s, flops, bytes, calls; per step of rank 0.
``communication``: key, kind, bytes, calls, time_s, exposed_s; per step of rank 0.
``alpha_beta``: op, alpha_s, beta_s_per_byte, reason (why there is no fit), world, wrong_elements: time = alpha + beta * bytes of collectives.
``stages``: key, rank, micro_batch, stage, phase (forward, backward, weight), start_s, end_s: one step of a pipeline, from its start.
``batches``: batch, fits, peak_gb, samples_per_s, reason: what ``find_max_batch`` tried.
Facts: ``machine_peaks`` = {"matmul_flops": {precision: FLOP/s of a rank}, "copy_bytes_per_s": B/s of a rank}, read plus written.
"""
