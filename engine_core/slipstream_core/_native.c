/* `slipstream_core._native`: what stands in C files beside the modules that use it. */
#include "module.h"

int add_ngram_index(PyObject *module);
int add_report_reader(PyObject *module);
int add_span_completer(PyObject *module);
int add_step_sender(PyObject *module);

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "slipstream_core._native", 0, -1, 0, 0, 0, 0, 0};

PyMODINIT_FUNC PyInit__native(void)
{
    static const AddPart parts[] = {add_ngram_index, add_report_reader, add_span_completer,
                                    add_step_sender};
    return module_of(&definition, parts, sizeof parts / sizeof *parts);
}
