//! The protocol over gRPC.

use super::infer::{REFUSED, Request, infer, unsupported};
use super::proto::grpc_inference_service_server::{GrpcInferenceService, GrpcInferenceServiceServer};
use super::proto::infer_parameter::ParameterChoice;
use super::proto::model_infer_request::InferInputTensor;
use super::proto::model_infer_response::InferOutputTensor;
use super::proto::model_metadata_response::TensorMetadata;
use super::proto::{
    InferParameter, InferTensorContents, ModelInferRequest, ModelInferResponse, ModelMetadataRequest,
    ModelMetadataResponse, ModelReadyRequest, ModelReadyResponse, ServerLiveRequest, ServerLiveResponse,
    ServerMetadataRequest, ServerMetadataResponse, ServerReadyRequest, ServerReadyResponse,
};
use super::{EXTENSIONS, SERVER, VERSION, datatype, model, name, rest, shape};
use crate::deadline::Deadline;
use crate::problem::Problem;
use crate::server::App;
use axum::body::Body;
use axum::extract;
use axum::http::HeaderMap;
use futures_util::stream::{self, StreamExt};
use half::{bf16, f16};
use moh_runtime::{ElementType, Tensor, TensorData, TensorInfo};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tonic::{Response, Status};
use tower::util::MapRequest;

/// The service, for a router: a request's time begins before its message comes, and what does not come is not waited for.
pub(crate) fn service(
    app: Arc<App>,
) -> MapRequest<GrpcInferenceServiceServer<Grpc>, impl Fn(extract::Request) -> extract::Request + Clone> {
    let (limit, stall, longest) = (app.limits.body, app.limits.stall, app.limits.timeout);
    let ending = app.clone();
    let service = GrpcInferenceServiceServer::new(Grpc(app)).max_decoding_message_size(limit);
    MapRequest::new(service, move |mut request: extract::Request| {
        let deadline = Deadline::after(timeout(request.headers()).unwrap_or(longest).min(longest));
        request.extensions_mut().insert(deadline);
        request.map(|body| impatient(body, stall, deadline, ending.clone()))
    })
}

/// A body that fails where nothing of it comes for so long, all of it does not come in time, or the server ends before.
fn impatient(body: Body, stall: Duration, deadline: Deadline, app: Arc<App>) -> Body {
    let parts = stream::try_unfold((body.into_data_stream(), app), move |(mut parts, app)| async move {
        let left = deadline.left();
        let slow = |_| match left < stall {
            true => deadline.arrived().into(),
            false => Status::deadline_exceeded(format!("nothing of the message came for {} s", stall.as_secs_f64())),
        };
        let part = tokio::select! {
            part = tokio::time::timeout(stall.min(left), parts.next()) => part.map_err(slow)?,
            () = app.closed() => return Err(Problem::closing().into()),
        };
        let part = part.transpose().map_err(|_| Status::cancelled("the message broke off"))?;
        Ok::<_, Status>(part.map(|part| (part, (parts, app))))
    });
    Body::from_stream(parts)
}

pub(crate) struct Grpc(Arc<App>);

type Answer<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl GrpcInferenceService for Grpc {
    async fn server_live(&self, _: tonic::Request<ServerLiveRequest>) -> Answer<ServerLiveResponse> {
        Ok(Response::new(ServerLiveResponse { live: true }))
    }

    async fn server_ready(&self, _: tonic::Request<ServerReadyRequest>) -> Answer<ServerReadyResponse> {
        Ok(Response::new(ServerReadyResponse { ready: self.0.is_ready() }))
    }

    async fn model_ready(&self, request: tonic::Request<ModelReadyRequest>) -> Answer<ModelReadyResponse> {
        let ModelReadyRequest { name, version } = request.get_ref();
        let ready = model(&self.0, name, version)?.health.is_ready();
        Ok(Response::new(ModelReadyResponse { ready }))
    }

    async fn server_metadata(&self, _: tonic::Request<ServerMetadataRequest>) -> Answer<ServerMetadataResponse> {
        let extensions = EXTENSIONS.map(str::to_owned).to_vec();
        let version = moh_runtime::short_version().to_owned();
        Ok(Response::new(ServerMetadataResponse { name: SERVER.to_owned(), version, extensions }))
    }

    async fn model_metadata(&self, request: tonic::Request<ModelMetadataRequest>) -> Answer<ModelMetadataResponse> {
        let served = model(&self.0, &request.get_ref().name, &request.get_ref().version)?;
        let port = |info: &TensorInfo| TensorMetadata {
            name: info.name.clone(),
            datatype: name(info.element_type).to_owned(),
            shape: shape(info),
        };
        Ok(Response::new(ModelMetadataResponse {
            name: served.name.clone(),
            versions: vec![VERSION.to_owned()],
            platform: served.platform.to_owned(),
            inputs: served.inputs.iter().map(port).collect(),
            outputs: served.outputs.iter().map(port).collect(),
        }))
    }

    async fn model_infer(&self, request: tonic::Request<ModelInferRequest>) -> Answer<ModelInferResponse> {
        let deadline = request.extensions().get().copied();
        let deadline = deadline.unwrap_or_else(|| Deadline::after(self.0.limits.timeout));
        let request = request.into_inner();
        let raw = &request.raw_input_contents;
        if !raw.is_empty() && raw.len() != request.inputs.len() {
            let (found, expected) = (raw.len(), request.inputs.len());
            let message = format!("raw_input_contents: expected an entry for each of {expected} inputs, found {found}");
            return Err(Problem::invalid(message).into());
        }
        check("", &request.parameters)?;
        for output in &request.outputs {
            check(&format!("output {}: ", output.name), &output.parameters)?;
        }
        let mut inputs = Vec::with_capacity(request.inputs.len());
        for (i, input) in request.inputs.iter().enumerate() {
            check(&format!("input {}: ", input.name), &input.parameters)?;
            inputs.push((input.name.clone(), tensor(input, raw.get(i))?));
        }
        let outputs = request.outputs.iter().map(|wanted| wanted.name.clone()).collect();
        let (model, version) = (&*request.model_name, &*request.model_version);
        let found = infer(&self.0, Request { model, version, inputs, outputs, deadline }).await?;
        let output = |(name, tensor): &(String, Tensor)| InferOutputTensor {
            name: name.clone(),
            datatype: super::name(tensor.element_type()).to_owned(),
            shape: tensor.shape().iter().map(|&size| i64::try_from(size).unwrap_or(i64::MAX)).collect(),
            ..InferOutputTensor::default()
        };
        Ok(Response::new(ModelInferResponse {
            outputs: found.iter().map(output).collect(),
            raw_output_contents: found.iter().map(|(_, tensor)| tensor.data().to_bytes()).collect(),
            model_name: request.model_name,
            model_version: VERSION.to_owned(),
            id: request.id,
            ..ModelInferResponse::default()
        }))
    }
}

/// Refuses parameters that are not supported. `of`: what has them, as in `output logits: `.
fn check(of: &str, parameters: &HashMap<String, InferParameter>) -> Result<(), Problem> {
    for name in REFUSED {
        let found = match parameters.get(name).and_then(|parameter| parameter.parameter_choice.as_ref()) {
            None | Some(ParameterChoice::BoolParam(false)) => continue,
            Some(ParameterChoice::Int64Param(0) | ParameterChoice::Uint64Param(0)) => continue,
            Some(ParameterChoice::StringParam(text)) if text.is_empty() => continue,
            Some(ParameterChoice::BoolParam(found)) => found.to_string(),
            Some(ParameterChoice::Int64Param(found)) => found.to_string(),
            Some(ParameterChoice::Uint64Param(found)) => found.to_string(),
            Some(ParameterChoice::DoubleParam(found)) => found.to_string(),
            Some(ParameterChoice::StringParam(found)) => format!("{found:?}"),
        };
        return Err(unsupported(of, name, &found));
    }
    Ok(())
}

/// What the client waits: `grpc-timeout`, at most 8 digits and a unit.
fn timeout(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get("grpc-timeout")?.to_str().ok()?;
    let (number, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let number = number.parse::<u64>().ok().filter(|_| number.len() <= 8)?;
    Some(match unit {
        "H" => Duration::from_secs(number * 3600),
        "M" => Duration::from_secs(number * 60),
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
        _ => return None,
    })
}

fn tensor(input: &InferInputTensor, raw: Option<&Vec<u8>>) -> Result<Tensor, Problem> {
    let name = &input.name;
    let ty = datatype::parse(name, &input.datatype)?;
    let (shape, count) = datatype::elements(name, &input.shape)?;
    match (raw, &input.contents) {
        (Some(_), Some(_)) => {
            Err(Problem::invalid(format!("input {name}: found contents and raw_input_contents, expected one of them")))
        }
        (Some(raw), None) => rest::binary(name, ty, shape, count, raw),
        (None, contents) => {
            let data = contents.as_ref().map_or_else(|| Ok(TensorData::zeros(ty, 0)), |own| of_contents(name, ty, own));
            Tensor::from_data(shape, data?).map_err(|e| Problem::invalid(format!("input {name}: {e}")))
        }
    }
}

/// The elements in the field of their type.
fn of_contents(name: &str, ty: ElementType, contents: &InferTensorContents) -> Result<TensorData, Problem> {
    let floats = &contents.fp32_contents;
    // A number beyond the range of the type, which would be infinite.
    let beyond = |&x: &f32, found: f32| match x.is_finite() && !found.is_finite() {
        true => Err(Problem::invalid(format!("input {name}: {x:e} is not a valid {}", datatype::name(ty)))),
        false => Ok(()),
    };
    Ok(match ty {
        ElementType::F32 => TensorData::F32(floats.clone()),
        ElementType::F16 => {
            let half = |x: &f32| f16::from_f32(*x);
            floats.iter().try_for_each(|x| beyond(x, half(x).to_f32()))?;
            TensorData::F16(floats.iter().map(half).collect())
        }
        ElementType::BF16 => {
            let half = |x: &f32| bf16::from_f32(*x);
            floats.iter().try_for_each(|x| beyond(x, half(x).to_f32()))?;
            TensorData::BF16(floats.iter().map(half).collect())
        }
        ElementType::F64 => TensorData::F64(contents.fp64_contents.clone()),
        ElementType::I64 => TensorData::I64(contents.int64_contents.clone()),
        ElementType::I32 => TensorData::I32(contents.int_contents.clone()),
        ElementType::Bool => TensorData::Bool(contents.bool_contents.clone()),
        ElementType::U8 => {
            let byte = |&x: &u32| {
                u8::try_from(x).map_err(|_| Problem::invalid(format!("input {name}: {x} is not a valid UINT8")))
            };
            TensorData::U8(contents.uint_contents.iter().map(byte).collect::<Result<_, _>>()?)
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An infinity that was sent stays one.
    #[test]
    fn numbers_beyond_the_range_of_halves_are_refused() {
        let of = |ty, number| {
            let contents = InferTensorContents { fp32_contents: vec![number], ..InferTensorContents::default() };
            of_contents("x", ty, &contents).map_err(|problem| problem.message)
        };
        assert_eq!(of(ElementType::F16, 7e4).err().as_deref(), Some("input x: 7e4 is not a valid FP16"));
        assert_eq!(of(ElementType::BF16, f32::MAX).err().as_deref(), Some("input x: 3.4028235e38 is not a valid BF16"));
        assert!(of(ElementType::F16, f32::INFINITY).is_ok() && of(ElementType::BF16, 7e4).is_ok());
    }

    #[test]
    fn timeouts_are_read_in_all_units() {
        let read = |text: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert("grpc-timeout", axum::http::HeaderValue::from_static(text));
            timeout(&headers)
        };
        for (text, expected) in [
            ("2H", Duration::from_secs(7200)),
            ("3M", Duration::from_secs(180)),
            ("4S", Duration::from_secs(4)),
            ("250m", Duration::from_millis(250)),
            ("99999999u", Duration::from_micros(99_999_999)),
            ("7n", Duration::from_nanos(7)),
        ] {
            assert_eq!(read(text), Some(expected), "{text}");
        }
        for bad in ["", "S", "5", "100000000S", "-1S", "1s"] {
            assert_eq!(read(bad), None, "{bad:?}");
        }
    }
}
