//! Nodes while a model is loaded: attributes, constants, shape inference.

use super::*;

pub(super) unsafe extern "system" fn constant_input(
    info: *const OrtKernelInfo,
    index: usize,
    is_constant: *mut i32,
    out: *mut *const OrtValue,
) -> OrtStatusPtr {
    let found = unsafe { node(info) }.constants.iter().find(|(i, _)| *i == index);
    unsafe {
        is_constant.write(i32::from(found.is_some()));
        out.write(found.map_or(std::ptr::null(), |(_, tensor)| tensor.cast()));
    }
    ok()
}

pub(super) unsafe fn node<'a, R>(node: *const R) -> &'a Node {
    unsafe { &*node.cast() }
}

pub(super) unsafe fn named(of: &Node, name: *const c_char) -> Option<&Value> {
    let name = unsafe { CStr::from_ptr(name) }.to_str().unwrap();
    of.attributes.iter().find(|(n, _)| *n == name).map(|(_, value)| value)
}

pub(super) unsafe extern "system" fn attribute_int(
    info: *const OrtKernelInfo,
    name: *const c_char,
    out: *mut i64,
) -> OrtStatusPtr {
    match unsafe { named(node(info), name) } {
        Some(Value::Int(value)) => unsafe { out.write(*value) },
        _ => return fail("no such integer"),
    }
    ok()
}

pub(super) unsafe extern "system" fn attribute_float(
    info: *const OrtKernelInfo,
    name: *const c_char,
    out: *mut f32,
) -> OrtStatusPtr {
    match unsafe { named(node(info), name) } {
        Some(Value::Float(value)) => unsafe { out.write(*value) },
        _ => return fail("no such float"),
    }
    ok()
}

pub(super) unsafe extern "system" fn attribute_ints(
    info: *const OrtKernelInfo,
    name: *const c_char,
    out: *mut i64,
    len: *mut usize,
) -> OrtStatusPtr {
    let ints = match unsafe { named(node(info), name) } {
        Some(Value::Ints(ints)) => ints.as_slice(),
        Some(_) => &[],
        None => return fail("no such list"),
    };
    unsafe {
        if !out.is_null() {
            assert!(*len >= ints.len());
            out.copy_from_nonoverlapping(ints.as_ptr(), ints.len());
        }
        len.write(ints.len());
    }
    ok()
}

pub(super) unsafe extern "system" fn node_input_count<R>(of: *const R, out: *mut usize) -> OrtStatusPtr {
    unsafe { out.write(node(of).inputs.len()) };
    ok()
}

pub(super) unsafe extern "system" fn input_type_info(
    info: *const OrtKernelInfo,
    index: usize,
    out: *mut *mut OrtTypeInfo,
) -> OrtStatusPtr {
    match unsafe { &node(info).inputs[index] } {
        Some(info) => unsafe { out.write(give(info.clone())) },
        None => return fail("the input does not have a type"),
    }
    ok()
}

pub(super) unsafe extern "system" fn cast_type_info(
    info: *const OrtTypeInfo,
    out: *mut *const OrtTensorTypeAndShapeInfo,
) -> OrtStatusPtr {
    unsafe { out.write(info.cast()) };
    ok()
}

pub(super) unsafe extern "system" fn input_type_shape(
    context: *const OrtShapeInferContext,
    index: usize,
    out: *mut *mut OrtTensorTypeAndShapeInfo,
) -> OrtStatusPtr {
    let info = unsafe { node(context) }.inputs[index].as_ref().unwrap();
    unsafe { out.write(std::ptr::from_ref(info).cast_mut().cast()) };
    ok()
}

pub(super) unsafe extern "system" fn find_attribute(
    context: *const OrtShapeInferContext,
    name: *const c_char,
    out: *mut *const OrtOpAttr,
) -> OrtStatusPtr {
    match unsafe { named(node(context), name) } {
        Some(value) => unsafe { out.write(std::ptr::from_ref(value).cast()) },
        None => return fail("Attribute does not exist."),
    }
    ok()
}

pub(super) unsafe extern "system" fn read_attribute(
    attribute: *const OrtOpAttr,
    ty: OrtOpAttrType,
    data: *mut c_void,
    len: usize,
    out: *mut usize,
) -> OrtStatusPtr {
    unsafe { out.write(0) };
    match (unsafe { &*attribute.cast::<Value>() }, ty) {
        (Value::Int(value), OrtOpAttrType::ORT_OP_ATTR_INT) if len >= 8 => unsafe { data.cast::<i64>().write(*value) },
        (Value::Float(value), OrtOpAttrType::ORT_OP_ATTR_FLOAT) if len >= 4 => unsafe {
            data.cast::<f32>().write(*value)
        },
        (Value::Ints(values), OrtOpAttrType::ORT_OP_ATTR_INTS) => {
            let bytes = size_of_val(values.as_slice());
            unsafe { out.write(bytes) };
            if len < bytes {
                return fail("too little room");
            }
            if bytes > 0 {
                unsafe { data.cast::<i64>().copy_from_nonoverlapping(values.as_ptr(), values.len()) };
            }
        }
        (_, OrtOpAttrType::ORT_OP_ATTR_INTS) => {}
        _ => return fail("Attribute has no such value."),
    }
    ok()
}

pub(super) unsafe extern "system" fn set_output(
    context: *const OrtShapeInferContext,
    index: usize,
    info: *const OrtTensorTypeAndShapeInfo,
) -> OrtStatusPtr {
    assert_eq!(index, 0);
    let info = unsafe { &*info.cast::<Info>() };
    if info.sizes.len() != info.names.len() {
        return fail("symbolic and integer dims mismatch!");
    }
    unsafe { (*context.cast_mut().cast::<Node>()).output = Some(info.clone()) };
    ok()
}
