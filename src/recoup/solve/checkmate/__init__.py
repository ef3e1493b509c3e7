"""The strategy ``checkmate``: the whole schedule of a small step as one integer program, storages rebuilt more than once included.

A *stage* t is the first unpacking of a storage e_t in a backward pass: replays run at no other moment. ``makes(o)`` are the droppable
storages that operation o allocates or writes. All variables are 0 or 1; those with * are decided, the others follow from them; sums
over stages stay within one pass:

    D_v*     v is dropped, and rebuilt when it is needed         W_tv   v is wanted in stage t: asked for, and no copy is there
    F_tv*    copies of v are held since stage t                  O_to   o is replayed in stage t
    H_tv     is sum(s <= t) F_sv, or D_v once v was unpacked     P_po   at moment p, o has yet to be replayed for what will be held

    W_tv  = D_v - H_(t-1)v  if v = e_t, otherwise  W_tv >= O_to + D_v - 1 - H_(t-1)v  for each o that reads v,
    W_tv <= D_v - H_(t-1)v  and                    W_tv <= sum O_to                   over these o
    O_to >= W_tv            for v in makes(o),     O_to <= sum W_tv                   over these v
    F_tv <= O_to            for the o that allocates v,  H_tv <= D_v
    D_v  <= sum D_w         over the w made from v, if autograd does not save v
    D_v  <= D_u             for u that v is made from, if autograd does not save u and the executor cannot keep it either

What runs is then just what the executor runs. The least sum of (seconds_o + replay_seconds) O_to is sought, together with the seconds
for capturing the module calls in which something dropped is made. Memory is one row for each recorded operation and one for each
operation that a stage may replay (where it does not, the row counts what stands between two others). Within the budget are at moment p

    base_p + sum bytes_v (1 - D_v) + sum bytes_u L_pu + sum bytes_v X_pv + sum state_bytes max D_v + (fresh_o + scratch_o) O_to,

summed over the v that only saves hold at p, the *leaves* u that are kept for replays beyond their lives, the copies, and the random
operations that made v so far. L, X, P and N, by which a save that is not yet released has w in its recipe, are the least with

    L_pu >= N_pu - D_u
    N_pu >= D_w                    for each w made from u whose save is not yet released
    N_pu >= D_w + N_pw - 1         for the other w made from u
    X_pv >= H_pv                   while v has yet to be unpacked, or a save of it that was has yet to be released
    X_pv >= H_pv + P_po - 1        for each o that reads v
    X_pv >= O_to + D_v - 1         for each o that reads v and is still to come in this stage, once v may be made in it
    P_po >= D_w - H_pw             for each w in makes(o) that the pass unpacks
    P_po >= D_w - H_pw + P_pq - 1  for the other w in makes(o) and each q that reads w

where H_p is H_t for what operations before p make, H_(t-1) for the rest. (A storage that is made beside another one, before its own
writes have run, has a second H for the whole of it.) Every schedule satisfies every row, so the optimum is a lower bound. Should the
simulator find the schedule over the budget, or slower than that, it is cut off and the program is solved again.

Jain, Jain, Nrusimha, Gholami, Abbeel, Keutzer, Stoica, Gonzalez, "Checkmate: Breaking the memory wall with optimal tensor
rematerialization", MLSys 2020 (arXiv:1910.02653). Its R is O, its S is H (what is held stays until its last use), its FREE is in X.
"""

from recoup.solve.checkmate.search import Checkmate

__all__ = ["Checkmate"]
