//! The Open Inference Protocol over gRPC.

use crate::client::measured;
use crate::models::{limited, locked, start};
use crate::tensors::{encoded, logits, picture};
use hyper_util::rt::{TokioExecutor, TokioIo};
use moh_serve::proto::grpc_inference_service_client::GrpcInferenceServiceClient;
use moh_serve::proto::infer_parameter::ParameterChoice;
use moh_serve::proto::model_infer_request::{InferInputTensor, InferRequestedOutputTensor};
use moh_serve::proto::{
    InferParameter, InferTensorContents, ModelInferRequest, ModelMetadataRequest, ModelReadyRequest, ServerLiveRequest,
    ServerMetadataRequest, ServerReadyRequest,
};
use std::net::SocketAddr;
use std::time::Duration;
use tonic::body::Body;
use tonic::{Code, Request};

type Sender = hyper::client::conn::http2::SendRequest<Body>;

/// A connection, as a service.
#[derive(Clone)]
struct Connection(Sender);

impl tower::Service<axum::http::Request<Body>> for Connection {
    type Response = axum::http::Response<hyper::body::Incoming>;
    type Error = hyper::Error;
    type Future = std::pin::Pin<Box<dyn Future<Output = Result<Self::Response, hyper::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), hyper::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: axum::http::Request<Body>) -> Self::Future {
        Box::pin(self.0.send_request(request))
    }
}

async fn connection(address: SocketAddr) -> Connection {
    let stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let handshake = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream));
    let (sender, connection) = handshake.await.unwrap();
    tokio::spawn(connection);
    Connection(sender)
}

async fn client(address: SocketAddr) -> GrpcInferenceServiceClient<Connection> {
    let origin = format!("http://{address}").parse().unwrap();
    GrpcInferenceServiceClient::with_origin(connection(address).await, origin)
}

fn run<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Runtime::new().unwrap().block_on(work)
}

fn request(number: usize, is_raw: bool) -> ModelInferRequest {
    let numbers = picture(number);
    let (datatype, bytes) = encoded(&numbers);
    let contents = (!is_raw).then(|| InferTensorContents { fp32_contents: numbers, ..InferTensorContents::default() });
    let input = InferInputTensor {
        name: "pixel_values".to_owned(),
        datatype: datatype.to_owned(),
        shape: vec![1, 3, 64, 64],
        contents,
        ..InferInputTensor::default()
    };
    ModelInferRequest {
        model_name: "digits".to_owned(),
        id: "mine".to_owned(),
        inputs: vec![input],
        raw_input_contents: if is_raw { vec![bytes] } else { Vec::new() },
        ..ModelInferRequest::default()
    }
}

#[test]
fn every_method_answers_as_rest_does() {
    let server = start(&["digits", "llama"]);
    run(async {
        let mut client = client(server.address()).await;
        assert!(client.server_live(ServerLiveRequest {}).await.unwrap().into_inner().live);
        assert!(client.server_ready(ServerReadyRequest {}).await.unwrap().into_inner().ready);
        assert_eq!(client.server_metadata(ServerMetadataRequest {}).await.unwrap().into_inner().name, "moh-run");
        let (name, version) = ("digits".to_owned(), String::new());
        let ready = ModelReadyRequest { name: name.clone(), version: version.clone() };
        assert!(client.model_ready(ready).await.unwrap().into_inner().ready);
        let metadata = client.model_metadata(ModelMetadataRequest { name, version }).await.unwrap().into_inner();
        assert_eq!((&*metadata.inputs[0].name, &metadata.inputs[0].shape[..]), ("pixel_values", &[-1, 3, 64, 64][..]));
        let expected = logits(&crate::models::tract(), &picture(5));
        for is_raw in [true, false] {
            let answer = client.model_infer(request(5, is_raw)).await.unwrap().into_inner();
            assert_eq!((&*answer.id, &answer.outputs[0].shape[..]), ("mine", &[1, 10][..]));
            let ty = if answer.outputs[0].datatype == "FP16" {
                moh_runtime::ElementType::F16
            } else {
                moh_runtime::ElementType::F32
            };
            let found = ty.read(&answer.raw_output_contents[0]).unwrap().as_data().to_f32().unwrap();
            assert!(
                found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 2e-2 * b.abs().max(1.0)),
                "{found:?}, {expected:?}"
            );
        }
    });
    server.stop();
}

#[test]
fn bad_requests_have_the_codes_of_grpc() {
    let server = limited(&["digits"], |limits| limits.body = 100_000);
    let address = server.address();
    run(async {
        let mut client = client(server.address()).await;
        let mut refused = async |change: &dyn Fn(&mut ModelInferRequest)| {
            let mut request = request(0, true);
            change(&mut request);
            let status = client.model_infer(request).await.unwrap_err();
            (status.code(), status.message().to_owned())
        };
        assert_eq!(refused(&|r| r.model_name = "nobody".to_owned()).await.0, Code::NotFound);
        let measured = measured(address, &["moh_requests_total", "GRPCInferenceService", "grpc 5"]);
        assert!(measured.is_some_and(|requests| requests >= 1.0), "{measured:?}");
        assert_eq!(refused(&|r| r.model_version = "2".to_owned()).await.0, Code::NotFound);
        let (code, message) = refused(&|r| r.raw_input_contents[0].truncate(7)).await;
        assert!(code == Code::InvalidArgument && message.contains("found 7"), "{code} {message}");
        assert_eq!(refused(&|r| r.raw_input_contents.push(Vec::new())).await.0, Code::InvalidArgument);
        assert_eq!(refused(&|r| r.inputs[0].datatype = "X".to_owned()).await.0, Code::InvalidArgument);
        assert_eq!(refused(&|r| r.inputs[0].shape = vec![i64::MIN]).await.0, Code::InvalidArgument);
        assert_eq!(refused(&|r| r.inputs.clear()).await.0, Code::InvalidArgument);
        assert_eq!(refused(&|r| r.raw_input_contents[0] = vec![0; 200_000]).await.0, Code::OutOfRange);
        let number = |number| InferParameter { parameter_choice: Some(ParameterChoice::Int64Param(number)) };
        let classes = |classes| InferRequestedOutputTensor {
            name: "logits".to_owned(),
            parameters: [("classification".to_owned(), number(classes))].into(),
        };
        let (code, message) = refused(&|r| r.outputs = vec![classes(3)]).await;
        let expected = "output logits: parameters.classification: not supported here; expected none, found 3";
        assert_eq!((code, &*message), (Code::InvalidArgument, expected));
        let (code, message) = refused(&|r| drop(r.parameters.insert("sequence_id".to_owned(), number(5)))).await;
        assert!(code == Code::InvalidArgument && message.contains("parameters.sequence_id"), "{code} {message}");
        let usual = ModelInferRequest { outputs: vec![classes(0)], ..request(0, true) };
        assert!(client.model_infer(usual).await.is_ok());
        // The connection is as good as before.
        assert!(client.model_infer(request(1, true)).await.is_ok());
        let mut hurried = Request::new(request(1, true));
        hurried.metadata_mut().insert("grpc-timeout", "1n".parse().unwrap());
        // Before its message came, or while it waited.
        let code = client.model_infer(hurried).await.unwrap_err().code();
        assert!([Code::DeadlineExceeded, Code::Unavailable].contains(&code), "{code}");
    });
    server.stop();
}

#[test]
fn a_message_that_does_not_come_is_not_waited_for() {
    let server = limited(&["digits"], |limits| limits.stall = Duration::from_millis(200));
    run(async {
        for (timeout, words) in [("9S", "nothing of the message came for 0.2 s"), ("100m", "within the 0.1 s")] {
            let nothing = futures_util::stream::pending::<Result<axum::body::Bytes, std::io::Error>>();
            let uri = format!("http://{}/inference.GRPCInferenceService/ModelInfer", server.address());
            let request = axum::http::Request::post(uri).header("content-type", "application/grpc");
            let request = request.header("te", "trailers").header("grpc-timeout", timeout);
            let request = request.body(Body::new(axum::body::Body::from_stream(nothing))).unwrap();
            let answer = connection(server.address()).await.0.send_request(request).await.unwrap();
            assert_eq!(answer.headers()["grpc-status"], (Code::DeadlineExceeded as i32).to_string().as_str());
            let message = answer.headers()["grpc-message"].to_str().unwrap().replace("%20", " ");
            assert!(message.contains(words), "{message}");
        }
    });
    server.stop();
}

#[test]
fn a_method_that_is_none_is_named() {
    let server = start(&["digits"]);
    run(async {
        let uri = format!("http://{}/inference.GRPCInferenceService/ModelStatistics", server.address());
        let request =
            axum::http::Request::post(uri).header("content-type", "application/grpc").header("te", "trailers");
        let request = request.body(Body::empty()).unwrap();
        let answer = connection(server.address()).await.0.send_request(request).await.unwrap();
        assert_eq!(answer.headers()["grpc-status"], (Code::Unimplemented as i32).to_string().as_str());
        let message = answer.headers()["grpc-message"].to_str().unwrap();
        assert!(message.contains("GRPCInferenceService/ModelStatistics"), "{message}");
    });
    server.stop();
}

#[test]
fn keys_are_metadata() {
    let server = locked(&["digits"]);
    run(async {
        let mut client = client(server.address()).await;
        assert!(client.server_live(ServerLiveRequest {}).await.is_ok());
        assert_eq!(client.model_infer(request(0, true)).await.unwrap_err().code(), Code::Unauthenticated);
        let mut request = Request::new(request(0, true));
        request.metadata_mut().insert("authorization", "Bearer sk-right".parse().unwrap());
        assert!(client.model_infer(request).await.is_ok());
    });
    server.stop();
}
