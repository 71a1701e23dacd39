"""transformers as a contender: plain, prompt lookup, and assisted generation. Runs in an environment that has it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from job import Answer, Job, Unsupported, run_job


class Transformers:
    def __init__(self, job: Job) -> None:
        import torch
        import transformers

        torch.set_num_threads(job["threads"])
        transformers.utils.logging.set_verbosity_error()
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}, bfloat16"
        self.torch = torch
        self.model, self.tokenizer = self._load(transformers, job["model"], Path(job["work"]))
        self.options: dict[str, Any] = {}
        if job["mode"] == "lookup":
            self.options["prompt_lookup_num_tokens"] = 10
        elif job["mode"] == "draft":
            if not job["draft"]:
                raise Unsupported("assisted generation needs --draft")
            self.options["assistant_model"] = self._load(transformers, job["draft"], Path(job["work"]))[0]

    def _load(self, transformers: Any, source: str, work: Path) -> tuple[Any, Any]:
        """From a folder of weights that were taken out of the GGUF file once: transformers takes minutes for that."""
        file = Path(source)
        folder = work / f"transformers-{file.stem}"
        if not (folder / "config.json").is_file():
            self._convert(transformers, file, folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=self.torch.bfloat16)
        return model.eval(), transformers.AutoTokenizer.from_pretrained(str(folder))

    def _convert(self, transformers: Any, file: Path, folder: Path) -> None:
        """A model that came from a GGUF file counts as quantised, and is not saved as such: its weights go to a new one."""
        source, dtype = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}, self.torch.bfloat16
        loaded = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=dtype)
        config = transformers.AutoConfig.from_pretrained(**source)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.load_state_dict(loaded.state_dict())
        model.generation_config = loaded.generation_config
        transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
        model.save_pretrained(folder)

    def chat(self, text: str, max_tokens: int) -> Answer:
        inputs = self._inputs([text])
        clock = _FirstToken()
        start = time.perf_counter()
        with self.torch.inference_mode():
            out = self.model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False, streamer=clock, **self.options)
        ids = out[0, inputs["input_ids"].shape[1] :]
        end = time.perf_counter()
        return Answer(self.tokenizer.decode(ids, skip_special_tokens=True), len(ids), clock.first - start, end - clock.first)

    def step_s(self, rows: list[int], context: int) -> dict[int, float]:
        from transformers import DynamicCache

        times: dict[int, list[float]] = {count: [] for count in rows}
        with self.torch.inference_mode():
            cache = DynamicCache(config=self.model.config)
            self.model(self._ids(context), past_key_values=cache, use_cache=True, logits_to_keep=1)
            for _ in range(6):
                for count in rows:
                    start = time.perf_counter()
                    self.model(self._ids(count), past_key_values=cache, use_cache=True)
                    times[count].append(time.perf_counter() - start)
                    cache.crop(-count)
        return {count: sorted(values[1:])[len(values[1:]) // 2] for count, values in times.items()}  # the first one warms up

    def prefill_s(self, tokens: int) -> float:
        start = time.perf_counter()
        with self.torch.inference_mode():
            self.model(self._ids(tokens), use_cache=True, logits_to_keep=1)
        return time.perf_counter() - start

    def chat_together(self, texts: list[str], max_tokens: int) -> tuple[int, float]:
        """One padded batch."""
        start = time.perf_counter()
        inputs = self._inputs(texts)
        with self.torch.inference_mode():
            out = self.model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
        seconds = time.perf_counter() - start
        answers = out[:, inputs["input_ids"].shape[1] :].tolist()
        return sum(self._length(ids) for ids in answers), seconds

    def _length(self, ids: list[int]) -> int:
        """Up to the first end token, itself included."""
        ends = self.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        return next((index + 1 for index, token in enumerate(ids) if token in ends), len(ids))

    def _inputs(self, texts: list[str]) -> Any:
        self.tokenizer.padding_side = "left"
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        turns = [[{"role": "user", "content": text}] for text in texts]
        prompts = [self.tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False) for turn in turns]
        return self.tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)

    def _ids(self, count: int) -> Any:
        return (self.torch.arange(count)[None] * 7919 + 17) % self.model.config.vocab_size


class _FirstToken:
    """A streamer that notes when the first token came; the prompt is put before it."""

    def __init__(self) -> None:
        self.first = 0.0
        self._calls = 0

    def put(self, _value: object) -> None:
        self._calls += 1
        if self._calls == 2:
            self.first = time.perf_counter()

    def end(self) -> None:
        pass


if __name__ == "__main__":
    run_job(Transformers)
