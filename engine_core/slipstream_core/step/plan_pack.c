/* Writes a plan without scored positions into a slot: `PlanBuffer` in plan_codec.py is the reference,
 * with `PlanBounds.check` in plan_check.py.
 *
 * A Packer is made for a slot, the counts of a plan and the bounds that hold for it. `pack` returns
 * False, and the slot holds no plan, for anything that it does not take: then the reference says what
 * is wrong, or writes the plan.
 */
#include "module.h"

#include <stdint.h>
#include <string.h>

#define MAX_FIELDS 16
#define WORDS 11 /* of the header: magic, size, step, num_decodes, has_prompt, slices, five counts */
#define SIZE_WORD 1
#define VARYING_WORD 9 /* how many items the varying fields have */
#define UNCHECKED UINT64_MAX
#define VARYING (-1)

typedef struct {
    PyObject *name;
    int kind;            /* of numbers, as numpy has it: b, i or f */
    Py_ssize_t offset;   /* into the slot */
    Py_ssize_t itemsize; /* 1: bool, 4: int32 or float32, 8: int64 */
    Py_ssize_t num;      /* of items; VARYING: as many as the plan has, behind the field before */
    uint64_t shift;      /* added before a number is compared, so that -1 may be allowed */
    uint64_t end;        /* numbers are below it, and not negative */
} Field;

typedef struct {
    PyObject_HEAD
    Py_buffer slot;
    int64_t words[WORDS];
    Field fields[MAX_FIELDS];
    int num_fields;
    int query_lens, kv_lens; /* which fields these are; -1: they are not compared */
} Packer;

static PyObject *step_name, *num_decodes_name, *prompt_name;

static void packer_dealloc(Packer *self)
{
    for (int at = 0; at < self->num_fields; at++)
        Py_XDECREF(self->fields[at].name);
    if (self->slot.obj != NULL)
        PyBuffer_Release(&self->slot);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static int read_field(PyObject *given, Field *field, const Py_buffer *slot)
{
    unsigned long long shift, end;
    if (!PyArg_ParseTuple(given, "OCnnnKK", &field->name, &field->kind, &field->offset,
                          &field->itemsize, &field->num, &shift, &end)) {
        field->name = NULL;
        return -1;
    }
    Py_INCREF(field->name);
    field->shift = shift;
    field->end = end;
    const Py_ssize_t item = field->itemsize;
    if ((item != 1 && item != 4 && item != 8) || field->num < VARYING || field->offset < 0 ||
        field->offset % 8 || field->offset > slot->len ||
        (field->kind == 'f' && (item != 4 || end != UNCHECKED)) ||
        field->num > (slot->len - field->offset) / item) {
        PyErr_SetString(PyExc_ValueError, "Packer: a field beyond the slot");
        return -1;
    }
    return 0;
}

/* Packer(slot, words, fields, query_lens, kv_lens): words as in the header, without what
 * differs from plan to plan; fields as in Field; the index of those two fields, or -1 */
static PyObject *packer_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    (void)keywords;
    PyObject *slot, *words, *fields;
    int query_lens, kv_lens;
    if (!PyArg_ParseTuple(args, "OO!O!ii", &slot, &PyTuple_Type, &words, &PyTuple_Type, &fields,
                          &query_lens, &kv_lens))
        return NULL;
    const Py_ssize_t num = PyTuple_GET_SIZE(fields);
    if (num > MAX_FIELDS || PyTuple_GET_SIZE(words) != WORDS || query_lens >= num ||
        kv_lens >= num) {
        PyErr_SetString(PyExc_ValueError, "Packer: not a header, or too many fields");
        return NULL;
    }
    Packer *self = (Packer *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    if (PyObject_GetBuffer(slot, &self->slot, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS) < 0) {
        self->slot.obj = NULL;
        Py_DECREF(self);
        return NULL;
    }
    self->query_lens = query_lens;
    self->kv_lens = kv_lens;
    if (self->slot.len < (Py_ssize_t)sizeof self->words || (uintptr_t)self->slot.buf % 8) {
        PyErr_SetString(PyExc_ValueError, "Packer: a slot without a header's place");
        Py_DECREF(self);
        return NULL;
    }
    for (int at = 0; at < WORDS; at++) {
        self->words[at] = PyLong_AsLongLong(PyTuple_GET_ITEM(words, at));
        if (self->words[at] == -1 && PyErr_Occurred()) {
            Py_DECREF(self);
            return NULL;
        }
    }
    for (; self->num_fields < num; self->num_fields++) {
        PyObject *given = PyTuple_GET_ITEM(fields, self->num_fields);
        if (!PyTuple_Check(given) ||
            read_field(given, &self->fields[self->num_fields], &self->slot) < 0) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_TypeError, "Packer: a field is a tuple");
            Py_XDECREF(self->fields[self->num_fields].name);
            Py_DECREF(self);
            return NULL;
        }
    }
    for (int pair = 0; pair < 2; pair++) { /* the two that are compared number for number */
        const int at = pair ? kv_lens : query_lens;
        if (at >= 0 && (self->fields[at].itemsize != 4 || self->fields[at].num < 0 ||
                        query_lens < 0 || kv_lens < 0 ||
                        self->fields[query_lens].num != self->fields[kv_lens].num)) {
            PyErr_SetString(PyExc_ValueError, "Packer: lengths that cannot be compared");
            Py_DECREF(self);
            return NULL;
        }
    }
    return (PyObject *)self;
}

/* True if a buffer is a dense column as the field declares it. */
static int fits(const Field *field, const Py_buffer *column)
{
    const char *format = column->format == NULL ? "B" : column->format;
    if (format[0] == '<' || format[0] == '=' || format[0] == '@')
        format++;
    const char kind = format[0];
    const int is_kind = field->kind == 'f'     ? kind == 'f'
                        : field->itemsize == 1   ? kind == '?'
                        : field->itemsize == 4 ? kind == 'i' || kind == 'l'
                                               : kind == 'l' || kind == 'q';
    if (!is_kind || format[1] != '\0' || column->itemsize != field->itemsize)
        return 0;
    if (column->ndim != 1 || (field->num != VARYING && column->shape[0] != field->num))
        return 0;
    return column->shape[0] < 2 || column->strides[0] == column->itemsize;
}

static int is_within(const Field *field, const char *data, Py_ssize_t num)
{
    const uint64_t shift = field->shift, end = field->end;
    uint64_t bad = 0;
    if (end == UNCHECKED)
        return 1;
    if (field->itemsize == 8) {
        const int64_t *numbers = (const int64_t *)data;
        for (Py_ssize_t at = 0; at < num; at++)
            bad |= (uint64_t)numbers[at] + shift >= end;
    } else if (field->itemsize == 4 && shift == 0 && end <= INT32_MAX) {
        const uint32_t *numbers = (const uint32_t *)data; /* negative ones are large */
        const uint32_t least_bad = (uint32_t)end;
        uint32_t found = 0;
        for (Py_ssize_t at = 0; at < num; at++)
            found |= numbers[at] >= least_bad;
        bad = found;
    } else if (field->itemsize == 4) {
        const int32_t *numbers = (const int32_t *)data;
        for (Py_ssize_t at = 0; at < num; at++)
            bad |= (uint64_t)(int64_t)numbers[at] + shift >= end;
    }
    return !bad;
}

/* A plan on its way into the slot. */
typedef struct {
    char *slot;
    Py_ssize_t bytes;   /* of the slot */
    Py_ssize_t end;     /* of what is written */
    Py_ssize_t varying; /* items of the varying fields; -1: none is written yet */
} Written;

/* The offset of a column of the plan; -1: it is not taken. */
static Py_ssize_t offset_of(const Field *field, Py_ssize_t num, Written *written)
{
    if (field->num != VARYING)
        return field->offset;
    if (written->varying >= 0 && written->varying != num)
        return -1;
    written->varying = num;
    return num > (written->bytes - written->end) / field->itemsize ? -1 : written->end;
}

/* 1: written and within its bounds, 0: it is not taken, -1: an exception */
static int write_field(const Field *field, PyObject *plan, Written *written)
{
    PyObject *given = PyObject_GetAttr(plan, field->name);
    if (given == NULL)
        return -1;
    Py_buffer column;
    if (PyObject_GetBuffer(given, &column, PyBUF_STRIDED_RO | PyBUF_FORMAT) < 0) {
        Py_DECREF(given);
        PyErr_Clear();
        return 0;
    }
    int is_taken = fits(field, &column);
    const Py_ssize_t num = is_taken ? column.shape[0] : 0;
    const Py_ssize_t offset = is_taken ? offset_of(field, num, written) : -1;
    is_taken = offset >= 0;
    if (is_taken) {
        const Py_ssize_t bytes = num * field->itemsize;
        char *to = written->slot + offset;
        if (bytes)
            memcpy(to, column.buf, bytes);
        written->end = (offset + bytes + 7) / 8 * 8;
        is_taken = is_within(field, to, num);
    }
    PyBuffer_Release(&column);
    Py_DECREF(given);
    return is_taken;
}

static int number_of(PyObject *plan, PyObject *name, int64_t *number)
{
    PyObject *given = PyObject_GetAttr(plan, name);
    if (given == NULL)
        return -1;
    *number = PyLong_AsLongLong(given);
    Py_DECREF(given);
    if (*number == -1 && PyErr_Occurred()) {
        PyErr_Clear();
        return 0;
    }
    return 1;
}

/* pack(plan) -> whether it was written */
static PyObject *packer_pack(Packer *self, PyObject *plan)
{
    char *slot = self->slot.buf;
    int64_t words[WORDS];
    memcpy(words, self->words, sizeof words);
    memset(slot, 0, 8); /* no plan, until all of it is written */
    PyObject *prompt = PyObject_GetAttr(plan, prompt_name);
    if (prompt == NULL)
        return NULL;
    Py_DECREF(prompt);
    if (prompt != Py_None)
        Py_RETURN_FALSE;
    int is_taken = number_of(plan, step_name, &words[2]);
    if (is_taken > 0)
        is_taken = number_of(plan, num_decodes_name, &words[3]);
    Written written = {slot, self->slot.len, sizeof words, -1};
    for (int at = 0; is_taken > 0 && at < self->num_fields; at++)
        is_taken = write_field(&self->fields[at], plan, &written);
    if (is_taken < 0)
        return NULL;
    words[SIZE_WORD] = written.end;
    words[VARYING_WORD] = written.varying < 0 ? 0 : written.varying;
    if (is_taken && self->query_lens >= 0) {
        const Field *query = &self->fields[self->query_lens], *kv = &self->fields[self->kv_lens];
        const int32_t *computed = (const int32_t *)(slot + query->offset);
        const int32_t *known = (const int32_t *)(slot + kv->offset);
        int32_t bad = 0;
        for (Py_ssize_t at = 0; at < query->num; at++)
            bad |= computed[at] > known[at];
        is_taken = !bad;
    }
    if (!is_taken)
        Py_RETURN_FALSE;
    memcpy(slot + 8, words + 1, sizeof words - 8);
    memcpy(slot, words, 8);
    Py_RETURN_TRUE;
}

static PyMethodDef packer_methods[] = {
    {"pack", (PyCFunction)packer_pack, METH_O, "Write a plan into the slot."},
    {0},
};

static PyType_Slot packer_slots[] = {
    {Py_tp_new, packer_new},
    {Py_tp_dealloc, packer_dealloc},
    {Py_tp_methods, packer_methods},
    {0},
};

static PyType_Spec packer_spec = {"slipstream_core._native.PlanPacker", sizeof(Packer), 0, Py_TPFLAGS_DEFAULT,
                                  packer_slots};

int add_plan_pack(PyObject *module)
{
    step_name = PyUnicode_InternFromString("step");
    num_decodes_name = PyUnicode_InternFromString("num_decodes");
    prompt_name = PyUnicode_InternFromString("prompt");
    if (step_name == NULL || num_decodes_name == NULL || prompt_name == NULL)
        return -1;
    return add_type(module, &packer_spec) == NULL ? -1 : 0;
}
