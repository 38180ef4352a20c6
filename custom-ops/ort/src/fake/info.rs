//! Types and shapes.

use super::*;

pub(super) unsafe extern "system" fn create_info(out: *mut *mut OrtTensorTypeAndShapeInfo) -> OrtStatusPtr {
    unsafe { out.write(give(Info { ty: 0, sizes: Vec::new(), names: Vec::new() })) };
    ok()
}

pub(super) unsafe fn info<'a>(info: *mut OrtTensorTypeAndShapeInfo) -> &'a mut Info {
    unsafe { &mut *info.cast() }
}

pub(super) unsafe extern "system" fn set_element_type(
    of: *mut OrtTensorTypeAndShapeInfo,
    ty: ONNXTensorElementDataType,
) -> OrtStatusPtr {
    unsafe { info(of) }.ty = ty as i32;
    ok()
}

pub(super) unsafe extern "system" fn set_dimensions(
    of: *mut OrtTensorTypeAndShapeInfo,
    sizes: *const i64,
    count: usize,
) -> OrtStatusPtr {
    unsafe { info(of) }.sizes = unsafe { std::slice::from_raw_parts(sizes, count) }.to_vec();
    ok()
}

pub(super) unsafe extern "system" fn set_names(
    of: *mut OrtTensorTypeAndShapeInfo,
    names: *mut *const c_char,
    count: usize,
) -> OrtStatusPtr {
    let names = unsafe { std::slice::from_raw_parts(names, count) };
    unsafe { info(of) }.names = names.iter().map(|&name| unsafe { CStr::from_ptr(name) }.to_owned()).collect();
    ok()
}

pub(super) unsafe extern "system" fn element_type(
    of: *const OrtTensorTypeAndShapeInfo,
    out: *mut ONNXTensorElementDataType,
) -> OrtStatusPtr {
    unsafe { out.cast::<i32>().write(info(of.cast_mut()).ty) };
    ok()
}

pub(super) unsafe extern "system" fn rank(of: *const OrtTensorTypeAndShapeInfo, out: *mut usize) -> OrtStatusPtr {
    unsafe { out.write(info(of.cast_mut()).sizes.len()) };
    ok()
}

pub(super) unsafe extern "system" fn dimensions(
    of: *const OrtTensorTypeAndShapeInfo,
    out: *mut i64,
    room: usize,
) -> OrtStatusPtr {
    let sizes = &unsafe { info(of.cast_mut()) }.sizes;
    unsafe { out.copy_from_nonoverlapping(sizes.as_ptr(), room.min(sizes.len())) };
    ok()
}

pub(super) unsafe extern "system" fn names(
    of: *const OrtTensorTypeAndShapeInfo,
    out: *mut *const c_char,
    room: usize,
) -> OrtStatusPtr {
    for (i, name) in unsafe { info(of.cast_mut()) }.names.iter().take(room).enumerate() {
        unsafe { out.add(i).write(name.as_ptr()) };
    }
    ok()
}
