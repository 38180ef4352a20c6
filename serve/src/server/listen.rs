//! Connections: HTTP/1 and HTTP/2 without TLS, each bounded in time.

use crate::config::Limits;
use crate::measure::Connection;
use axum::Router;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::AsyncReadExt;
use tokio::net::tcp::OwnedReadHalf;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio_io_timeout::TimeoutStream;

/// After the system could not accept a connection, as where there are too many open files.
const PAUSE: Duration = Duration::from_millis(100);
/// How HTTP/2 begins.
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Header fields of a request together.
const HEADERS: u32 = 64 << 10;
/// Requests at a time on one HTTP/2 connection.
const STREAMS: u32 = 256;

/// Serves connections until `stopped`; returns when the last one is done.
pub(super) async fn serve(listener: TcpListener, router: Router, limits: Limits, mut stopped: watch::Receiver<bool>) {
    let builder = Arc::new(builder(&limits));
    let (graceful, room) = (GracefulShutdown::new(), Arc::new(Semaphore::new(limits.connections.max(1))));
    loop {
        let accepted = tokio::select! {
            accepted = accept(&listener, &room) => accepted,
            _ = stopped.changed() => break,
        };
        let (stream, permit) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!("cannot accept a connection: {error}");
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        // Tokens go out as they come.
        let _ = stream.set_nodelay(true);
        let service = TowerToHyperService::new(router.clone());
        let (builder, watcher, mut stopped) = (builder.clone(), graceful.watcher(), stopped.clone());
        tokio::spawn(async move {
            let (_permit, _counted) = (permit, Connection::new());
            let (mut read, write) = stream.into_split();
            let begun = tokio::select! {
                begun = tokio::time::timeout(limits.stall, begins(&mut read)) => begun.ok().flatten(),
                _ = stopped.changed() => None,
            };
            let Some(head) = begun else { return };
            let mut stream = TimeoutStream::new(tokio::io::join(std::io::Cursor::new(head).chain(read), write));
            // A client that does not read what was sent to it; one that sends nothing may be waiting for a long answer.
            stream.set_write_timeout(Some(limits.stall));
            let connection = builder.serve_connection(TokioIo::new(Box::pin(stream)), service);
            if let Err(error) = watcher.watch(connection).await {
                tracing::debug!("connection: {error}");
            }
        });
    }
    drop(listener);
    graceful.shutdown().await;
}

type Accepted = (TcpStream, tokio::sync::OwnedSemaphorePermit);

/// The next connection, as soon as there is room for one; others wait with the system.
async fn accept(listener: &TcpListener, room: &Arc<Semaphore>) -> std::io::Result<Accepted> {
    let permit = room.clone().acquire_owned().await.map_err(std::io::Error::other)?;
    Ok((listener.accept().await?.0, permit))
}

/// Reads until a client has sent enough to tell HTTP/1 from HTTP/2, for which the builder would wait forever; `None`: it is gone.
async fn begins(stream: &mut OwnedReadHalf) -> Option<Vec<u8>> {
    let mut head = Vec::with_capacity(PREFACE.len());
    while head.len() < PREFACE.len() && PREFACE.starts_with(&head) {
        let left = (PREFACE.len() - head.len()) as u64;
        if stream.take(left).read_buf(&mut head).await.ok()? == 0 {
            return None;
        }
    }
    Some(head)
}

fn builder(limits: &Limits) -> auto::Builder<TokioExecutor> {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(limits.stall);
    let mut http2 = builder.http2();
    http2.timer(TokioTimer::new()).max_header_list_size(HEADERS).max_concurrent_streams(STREAMS);
    // A peer that is gone without a word is noticed.
    http2.keep_alive_interval(limits.stall).keep_alive_timeout(limits.stall);
    builder
}
