/* `slipstream_ipc._native`: what stands in C files beside the modules that use it. */
#include "module.h"

int add_link_numbers(PyObject *module);
int add_local_io(PyObject *module);
int add_logprob_pages(PyObject *module);
int add_token_pages(PyObject *module);

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "slipstream_ipc._native", 0, -1, 0, 0, 0, 0, 0};

PyMODINIT_FUNC PyInit__native(void)
{
    static const AddPart parts[] = {add_link_numbers, add_local_io, add_logprob_pages, add_token_pages};
    return module_of(&definition, parts, sizeof parts / sizeof *parts);
}
