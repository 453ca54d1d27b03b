"""Where the memory of a GPU went: replay of allocator traces, who held it at the peak, holes, growth, ranks compared.

    nouns      what a snapshot says (numpy columns) and what an analysis answers (plain, small, crosses processes)
    stacks     a Python/C++ stack -> who asked for the memory, in which phase of the step
    replay     events and final blocks -> the table of allocations, peaks
    holes      free memory at one moment: enough in all, or one block large enough?
    growth     what stays behind after each step
    analyse    all of these for one device
    compare    several ranks: who differs, and in what
    findings   the answers as findings, with advice that is computed
"""
