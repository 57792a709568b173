"""Temporary: replaced by room A."""
import torch


def explained_variance(returns, values):
    r = returns.double(); v = values.double()
    if r.numel() < 2 or float(r.var(correction=0)) == 0: return None
    return float(1 - (r - v).var(correction=0) / r.var(correction=0))


def effective_sample_size(lp, b, m):
    w = (lp - b)[m].double().clamp(-20, 20).exp()
    return float(w.sum() ** 2 / (w**2).sum() / w.numel())


def ratio_mean(lp, b, m):
    return float((lp - b)[m].double().clamp(-20, 20).exp().mean())


def behavior_kl(lp, b, m):
    return float((b - lp)[m].mean())


def staleness(ages, m):
    a = ages[m].double()
    rows = torch.where(m, ages, torch.full_like(ages, 10**6)).min(1).values.double()
    old = torch.where(m, ages, torch.full_like(ages, -1)).max(1).values.double()
    return {"queue": float(rows.mean()), "generation": float((old - rows).mean()), "mean": float(a.mean()), "max": float(a.max())}
