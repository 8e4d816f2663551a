/* `slipstream._native`: what stands in C files beside the modules that use it. */
#include "module.h"

int add_delta_objects(PyObject *module);
int add_delta_relay(PyObject *module);
int add_entry_ends(PyObject *module);
int add_logprob_tails(PyObject *module);
int add_prefix_memory(PyObject *module);
int add_received_rows(PyObject *module);
int add_socket_writer(PyObject *module);
int add_text_chunks(PyObject *module);

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "slipstream._native", 0, -1, 0, 0, 0, 0, 0};

PyMODINIT_FUNC PyInit__native(void)
{
    static const AddPart parts[] = {add_delta_objects, add_delta_relay, add_entry_ends,
                                    add_logprob_tails, add_prefix_memory, add_received_rows,
                                    add_socket_writer, add_text_chunks};
    return module_of(&definition, parts, sizeof parts / sizeof *parts);
}
