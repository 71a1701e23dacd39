"""Compiles every Triton kernel to an sm_90 cubin, which needs no GPU. Run by test_triton.py, in a process of its own."""

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specdec.kernels.triton import kv_commit, residual, row_choice, tree_walk

I32, I64, F32, F64 = "*i32", "*i64", "*fp32", "*fp64"
KERNELS = {
    "race": (
        row_choice.race,
        ["*bf16", "i64", "i32", "i32", F32, F32, I64, I64, I64, "i32", I64, F64, I32],
        {"BLOCK": row_choice.BLOCK},
    ),
    "best_part": (row_choice.best_part, [F64, I32, "i32", I64], {"PARTS": 64}),
    "walk": (
        tree_walk.walk,
        [I32, I32, I32, I64, I32, I32, "i64", "i32", I32, I32, I64, I64, I64, "i32"],
        {"NODES": 64},
    ),
    "move": (kv_commit.move, ["*bf16", I64, I64, "i32", "i32", "i32"], {"DEPTH": 8, "BLOCK": kv_commit.BLOCK}),
    "remains": (
        residual.remains,
        ["*bf16", "i64", F32, "i64", "i32", "i32", I32, F32, F64, I64, I64, I64, "i32", I32, I32, I32, F64, F64, "i32", F64, F64, I32],
        {"BLOCK": residual.BLOCK},
    ),
}


def main() -> None:
    for name, (kernel, types, constants) in KERNELS.items():
        signature = dict(zip(kernel.arg_names, [*types, *["constexpr"] * len(constants)], strict=True))
        source = ASTSource(kernel, signature, constexprs=constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
        assert compiled.asm["cubin"][:4] == b"\x7fELF", name
        print(name, len(compiled.asm["cubin"]), "bytes of cubin,", compiled.metadata.shared, "bytes of shared memory")


if __name__ == "__main__":
    main()
