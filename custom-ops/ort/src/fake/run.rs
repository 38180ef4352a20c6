//! Calls of a kernel: inputs, the output, threads, the log and the stream.

use super::*;

pub(super) unsafe fn call<'a>(context: *const OrtKernelContext) -> &'a mut Call {
    unsafe { &mut *context.cast_mut().cast() }
}

pub(super) unsafe extern "system" fn call_input_count(
    context: *const OrtKernelContext,
    out: *mut usize,
) -> OrtStatusPtr {
    unsafe { out.write(call(context).inputs.len()) };
    ok()
}

pub(super) unsafe extern "system" fn call_input(
    context: *const OrtKernelContext,
    index: usize,
    out: *mut *const OrtValue,
) -> OrtStatusPtr {
    let input = unsafe { call(context) }.inputs[index].as_ref();
    unsafe { out.write(input.map_or(std::ptr::null(), |tensor| std::ptr::from_ref(tensor).cast())) };
    ok()
}

pub(super) unsafe extern "system" fn call_output(
    context: *mut OrtKernelContext,
    index: usize,
    sizes: *const i64,
    count: usize,
    out: *mut *mut OrtValue,
) -> OrtStatusPtr {
    assert_eq!(index, 0);
    let call = unsafe { call(context) };
    if call.no_output {
        return fail("no output");
    }
    let dims: Vec<usize> =
        unsafe { std::slice::from_raw_parts(sizes, count) }.iter().map(|&d| d.try_into().unwrap()).collect();
    let bytes = 4 * dims.iter().product::<usize>();
    let own = if call.shared.is_some() { 0 } else { bytes };
    let mut output = Tensor::filled(Info::sized(call.output_type, &dims), own, 0);
    if let Some((input, distance)) = call.shared {
        let input = call.inputs[input].as_mut().unwrap();
        assert!(distance + bytes <= input.buffer.len() * 64, "the output reaches beyond the input's buffer");
        output.shared = Some(input.data().wrapping_add(distance).expose_provenance());
    }
    let output = call.output.insert(output);
    unsafe { out.write(std::ptr::from_mut(output).cast()) };
    ok()
}

pub(super) unsafe extern "system" fn tensor_info(
    value: *const OrtValue,
    out: *mut *mut OrtTensorTypeAndShapeInfo,
) -> OrtStatusPtr {
    unsafe { out.write(give((*value.cast::<Tensor>()).info.clone())) };
    ok()
}

pub(super) unsafe extern "system" fn tensor_data(value: *mut OrtValue, out: *mut *mut c_void) -> OrtStatusPtr {
    let tensor = unsafe { &mut *value.cast::<Tensor>() };
    unsafe { out.write(tensor.data().cast()) };
    ok()
}

/// Runs half of the tasks on another thread.
pub(super) unsafe extern "system" fn parallel_for(
    context: *const OrtKernelContext,
    task: unsafe extern "C" fn(*mut c_void, usize),
    total: usize,
    _: usize,
    data: *mut c_void,
) -> OrtStatusPtr {
    let data = data.expose_provenance();
    let run = |i| unsafe { task(std::ptr::with_exposed_provenance_mut(data), i) };
    std::thread::scope(|scope| {
        scope.spawn(|| (0..total / 2).for_each(run));
        (total / 2..total).for_each(run);
    });
    match unsafe { call(context) }.broken_threads {
        true => fail("no threads"),
        false => ok(),
    }
}

/// Messages written to the log.
pub(crate) static LOG: Mutex<Vec<String>> = Mutex::new(Vec::new());

pub(super) unsafe extern "system" fn get_logger(_: *const OrtKernelInfo, out: *mut *const OrtLogger) -> OrtStatusPtr {
    unsafe { out.write((&raw const LOG).cast()) };
    ok()
}

pub(super) unsafe extern "system" fn log(
    _: *const OrtLogger,
    _: OrtLoggingLevel,
    message: *const c_char,
    _: *const c_char,
    _: i32,
    _: *const c_char,
) -> OrtStatusPtr {
    LOG.lock().unwrap().push(unsafe { CStr::from_ptr(message) }.to_str().unwrap().to_owned());
    ok()
}
