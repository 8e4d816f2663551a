/* `slipstream_worker._native`: what stands in C files beside the modules that use it. */
#include "module.h"

int add_row_loops(PyObject *module);
int add_step_relay(PyObject *module);

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "slipstream_worker._native", 0, -1, 0, 0, 0, 0, 0};

PyMODINIT_FUNC PyInit__native(void)
{
    static const AddPart parts[] = {add_row_loops, add_step_relay};
    return module_of(&definition, parts, sizeof parts / sizeof *parts);
}
