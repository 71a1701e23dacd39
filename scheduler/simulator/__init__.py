"""Drives the scheduler and the KV manager of the engine on traces of real traffic, with a virtual clock.

    traces ──> requests ──> simulator: replicas, each a Scheduler + KVManager ──> report ──> text, JSON, chart
                              ▲                ▲
                 acceptance_law: fates    profiles: seconds

Nothing here decides anything: who runs, what is drafted and what is evicted is the engine's own code. What is made up is what
a device would give: seconds (theoretical from `roofline`, or measured) and whether a drafted token is accepted. No torch.
"""
