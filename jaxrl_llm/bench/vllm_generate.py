"""The traffic of the generation benchmark served by vLLM; run by the Python of an environment with vllm.

    /path/to/vllm/bin/python vllm_generate.py --model FOLDER [--repeats 3]

Prints one JSON line: seconds by name, medians. Left on its defaults but for what defines the work: float32, at most 64
sequences at once, and no prefix cache between turns (every prompt is new; samples of one prompt share it).
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import sys
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "3")
os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
sys.path.insert(0, str(pathlib.Path(__file__).parent))

from traffic import CONTEXT, NUM_SLOTS, TRAFFIC
from vllm import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    engine = LLM(
        arguments.model,
        dtype="float32",
        max_model_len=CONTEXT,
        max_num_seqs=NUM_SLOTS,
        enforce_eager=True,
        disable_log_stats=True,
    )

    def serve(traffic, turn: int) -> float:
        prompts = [{"prompt_token_ids": ids} for ids in traffic.prompts(turn)]
        sampling = [
            SamplingParams(n=traffic.samples, temperature=1.0, max_tokens=count, ignore_eos=True, detokenize=False)
            for count in traffic.lengths
        ]
        start = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        made = sum(len(one.token_ids) for output in outputs for one in output.outputs)
        assert made == traffic.tokens, (made, traffic.tokens)
        return seconds

    result = {}
    for traffic in TRAFFIC:
        serve(traffic, 0)
        result[traffic.name] = statistics.median(serve(traffic, turn) for turn in range(1, arguments.repeats + 1))
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
