"""OpenVINO GenAI as a contender: plain, prompt lookup, draft model. It reads the GGUF file itself."""

from __future__ import annotations

import time
from typing import Any

from job import Answer, Job, Unsupported, run_job


class OpenVINO:
    def __init__(self, job: Job) -> None:
        import openvino_genai as genai

        self.genai = genai
        self.version = f"openvino-genai {genai.__version__}"
        self.prompts = 0
        self.lookup, self.drafts = job["mode"] == "lookup", job["mode"] == "draft"
        options: dict[str, Any] = {"INFERENCE_NUM_THREADS": job["threads"]}
        if self.lookup:
            options["prompt_lookup"] = True
        elif self.drafts:
            if not job["draft"]:
                raise Unsupported("a draft model needs --draft")
            options["draft_model"] = self._draft_model(job["draft"])
        elif job["case"] == "concurrency":
            options["scheduler_config"] = genai.SchedulerConfig()  # continuous batching
        try:
            self.pipeline = genai.LLMPipeline(job["model"], "CPU", **options)
        except RuntimeError as error:
            raise Unsupported(str(error).strip().splitlines()[-1]) from error

    def _draft_model(self, path: str) -> Any:
        try:
            return self.genai.draft_model(path, "CPU")
        except RuntimeError as error:
            raise Unsupported("OpenVINO GenAI takes no draft model from a GGUF file") from error

    def chat(self, text: str, max_tokens: int) -> Answer:
        result = self.pipeline.generate([text], self._config(max_tokens))
        metrics = result.perf_metrics
        first = metrics.get_ttft().mean / 1000
        total = metrics.get_generate_duration().mean / 1000
        return Answer(result.texts[0], metrics.get_num_generated_tokens(), first, total - first)

    def prefill_s(self, tokens: int) -> float:
        import numpy as np
        import openvino as ov

        self.prompts += 1  # other tokens every time, since it keeps the KV of prompts
        ids = (np.arange(tokens, dtype=np.int64)[None] * 7919 + self.prompts) % 30000
        inputs = self.genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        start = time.perf_counter()
        self.pipeline.generate(inputs, self._config(1))
        return time.perf_counter() - start

    def chat_together(self, texts: list[str], max_tokens: int) -> tuple[int, float]:
        start = time.perf_counter()
        result = self.pipeline.generate(texts, self._config(max_tokens))
        return result.perf_metrics.get_num_generated_tokens(), time.perf_counter() - start

    def _config(self, max_tokens: int) -> Any:
        config = self.genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.do_sample = False
        if self.lookup:
            config.num_assistant_tokens, config.max_ngram_size = 5, 3
        elif self.drafts:
            config.num_assistant_tokens = 3
        return config


if __name__ == "__main__":
    run_job(OpenVINO)
