"""Where code that a model wrote may run: isolated, limited, and gone when its worker is.

    runner.Sandbox ── takes a box ─▶ box.Box ── spawns, as isolation says ─▶ inside.guest (process 1 of the box)
      (CodeRunner)    from its pool    reads stdout, stderr, reports            forks the program or session, watches it

`inside` is what runs in the box; everything else runs in the worker and believes nothing that comes out.
"""
