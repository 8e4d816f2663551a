"""What the adapter calls of FlashInfer 0.6, computed in torch: signatures and meaning as there.

Everything that a wrapper computes follows from what it was planned with: it refuses plans that the
library refuses, and runs that do not fit their plan.
"""

from __future__ import annotations

import torch

Pages = tuple[torch.Tensor, torch.Tensor]


def _attend(
    q: torch.Tensor,
    pages: Pages,
    qo_indptr: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    window_left: int,
    logits_soft_cap: float | None,
    sm_scale: float | None,
) -> torch.Tensor:
    keys, values = pages
    page_size = keys.shape[1]
    assert indices.dtype == indptr.dtype == last_page_len.dtype == torch.int32
    assert int(indptr[-1]) == len(indices)
    assert ((last_page_len >= 1) & (last_page_len <= page_size)).all()
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    output = torch.full_like(q, torch.nan)
    for row in range(len(indptr) - 1):
        own = indices[int(indptr[row]) : int(indptr[row + 1])].long()
        length = (len(own) - 1) * page_size + int(last_page_len[row])
        begin, end = int(qo_indptr[row]), int(qo_indptr[row + 1])
        group = q.shape[1] // keys.shape[2]
        key = keys[own].flatten(0, 1)[:length].repeat_interleave(group, 1).float()
        value = values[own].flatten(0, 1)[:length].repeat_interleave(group, 1).float()
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].float(), key) * scale
        if logits_soft_cap:
            scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
        at = torch.arange(length - (end - begin), length)[:, None]  # aligned at the row's end
        seen = torch.arange(length)
        hidden = seen > at
        if window_left >= 0:
            hidden |= seen + window_left < at
        probs = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        output[begin:end] = torch.einsum("hqk,khd->qhd", probs, value).to(q.dtype)
    return output


class _Wrapper:
    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD"
        self.num_plans = 0

    def _planned(
        self,
        qo_indptr: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        sizes: tuple[int, int, int, int],
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        dtype: torch.dtype,
    ) -> None:
        assert qo_indptr.device.type == indptr.device.type == "cpu", "or it waits for the device"
        self.num_plans += 1
        self._sizes, self._dtype = sizes, dtype
        self._plan = (qo_indptr, indptr, indices, last_page_len)
        self._options = (window_left, logits_soft_cap, sm_scale)

    def run(
        self, q: torch.Tensor, paged_kv_cache: Pages, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        num_heads, num_kv_heads, dim, page_size = self._sizes
        assert q.shape == (int(self._plan[0][-1]), num_heads, dim)
        assert q.dtype == self._dtype
        for part in paged_kv_cache:
            assert part.shape[1:] == (page_size, num_kv_heads, dim)
        result = _attend(q, paged_kv_cache, *self._plan, *self._options)
        if out is None:
            return result
        return out.copy_(result)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        assert use_tensor_cores, "without, not every number of heads to a key head has a kernel"

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
    ) -> None:
        assert kv_data_type in (None, q_data_type)
        self._planned(
            torch.arange(len(indptr), dtype=torch.int32),
            indptr,
            indices,
            last_page_len,
            (num_qo_heads, num_kv_heads, head_dim, page_size),
            window_left,
            logits_soft_cap,
            sm_scale,
            q_data_type,
        )


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        super().__init__(float_workspace_buffer, kv_layout)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        assert causal, "the stand-in knows nothing else"
        assert kv_data_type in (None, q_data_type)
        assert head_dim_vo in (None, head_dim_qk)
        self._planned(
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            (num_qo_heads, num_kv_heads, head_dim_qk, page_size),
            window_left,
            logits_soft_cap,
            sm_scale,
            q_data_type,
        )
