//! The server: models, pages, connections, and its end.

mod listen;

use crate::config::{Config, Limits, ModelSpec};
use crate::door;
use crate::error::{Error, Result};
use crate::keys::ApiKeys;
use crate::measure;
use crate::model::{Loader, Served};
use crate::problem::{Kind, Problem};
use crate::{oip, openai};
use axum::Router;
use axum::extract::State;
use axum::routing::get;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tower_http::catch_panic::CatchPanicLayer;
use utoipa::OpenApi;
use utoipa::openapi::Info;

/// Between two looks whether threads have ended.
const LOOK: Duration = Duration::from_millis(20);

/// What handlers share.
pub(crate) struct App {
    /// Empty until all are loaded.
    models: OnceLock<BTreeMap<String, Served>>,
    pub(crate) limits: Limits,
    pub(crate) keys: Option<ApiKeys>,
    /// Whether the server ends.
    closing: watch::Sender<bool>,
}

impl App {
    /// The model of that name.
    pub(crate) fn model(&self, name: &str) -> std::result::Result<&Served, Problem> {
        let models = self.models()?;
        models.get(name).ok_or_else(|| {
            let names: Vec<&str> = models.keys().map(String::as_str).collect();
            let asked: String = name.chars().take(100).collect();
            Problem::new(Kind::NotFound, format!("there is no model {asked:?}; there are: {}", names.join(", ")))
        })
    }

    /// All models by name, once they are loaded.
    pub(crate) fn models(&self) -> std::result::Result<&BTreeMap<String, Served>, Problem> {
        self.models.get().ok_or_else(|| Problem::new(Kind::Loading, "the server is loading its models"))
    }

    /// Those that are loaded.
    fn loaded(&self) -> impl Iterator<Item = &Served> {
        self.models.get().into_iter().flat_map(BTreeMap::values)
    }

    /// Measures what nothing tells of when it changes.
    fn measure(&self) {
        self.loaded().for_each(|model| measure::queue(&model.name, model.waiting()));
    }

    /// Whether every model takes requests.
    pub(crate) fn is_ready(&self) -> bool {
        !self.is_closing() && self.models.get().is_some() && self.loaded().all(|model| model.health.is_ready())
    }

    pub(crate) fn is_closing(&self) -> bool {
        *self.closing.borrow()
    }

    /// Waits until the server ends.
    pub(crate) async fn closed(&self) {
        // Fails without a sender only, and that is here.
        let _ = self.closing.subscribe().wait_for(|&closing| closing).await;
    }

    /// An error where nothing new is begun any more.
    pub(crate) fn check_open(&self) -> std::result::Result<(), Problem> {
        if self.is_closing() { Err(Problem::closing()) } else { Ok(()) }
    }
}

/// A server that answers until it is stopped.
pub struct Server {
    address: SocketAddr,
    app: Arc<App>,
    runtime: tokio::runtime::Runtime,
    connections: tokio::task::JoinHandle<()>,
}

impl Server {
    /// Listens, and loads the models: [`Server::listen`] and [`Server::load`].
    ///
    /// # Errors
    /// [`Error`] for models, an address or files that cannot be used.
    pub fn start(config: &Config) -> Result<Server> {
        let server = Server::listen(config)?;
        server.load(config)?;
        Ok(server)
    }

    /// Answers without a model, so that whoever asks knows that the server lives and is not ready: requests that need one get status 503.
    ///
    /// # Errors
    /// [`Error::Listen`] for the address, [`Error::Twice`] for models of one name, [`Error::Start`] without threads.
    pub fn listen(config: &Config) -> Result<Server> {
        for (i, spec) in config.models.iter().enumerate() {
            if let Some(other) = config.models[..i].iter().find(|other| other.name == spec.name) {
                let (first, second) = (other.path.clone(), spec.path.clone());
                return Err(Error::Twice { name: spec.name.clone(), first, second });
            }
        }
        let metrics = measure::handle();
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().thread_name("moh-serve").build();
        let runtime = runtime.map_err(Error::Start)?;
        let listening = runtime.block_on(tokio::net::TcpListener::bind(config.listen));
        let listener = listening.map_err(|source| Error::Listen { address: config.listen, source })?;
        let address = listener.local_addr().map_err(|source| Error::Listen { address: config.listen, source })?;
        let (limits, keys) = (config.limits.clone(), config.keys.clone());
        let (closing, stopped) = watch::channel(false);
        let app = Arc::new(App { models: OnceLock::new(), limits, keys, closing });
        let measured = app.clone();
        runtime.spawn(async move {
            loop {
                tokio::time::sleep(Duration::from_secs(5)).await;
                measured.measure();
                metrics.run_upkeep();
            }
        });
        let connections = runtime.spawn(listen::serve(listener, router(&app), app.limits.clone(), stopped));
        Ok(Server { address, app, runtime, connections })
    }

    /// Loads the models, and answers for them from then on. Once.
    ///
    /// # Errors
    /// [`Error`] for models and their files that cannot be used.
    pub fn load(&self, config: &Config) -> Result<()> {
        let loader = Loader::new(config);
        let load = |spec: &ModelSpec| Ok((spec.name.clone(), loader.load(spec)?));
        let models = config.models.iter().map(load).collect::<Result<BTreeMap<String, Served>>>()?;
        self.app.models.get_or_init(|| models);
        Ok(())
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Answers until INT or TERM, and then stops as [`Server::stop`] does. A second signal ends the program at once.
    ///
    /// # Errors
    /// [`Error::Start`] where signals cannot be waited for.
    pub fn run(self) -> Result<()> {
        let signals = self.runtime.block_on(async {
            let mut signals = Signals::new()?;
            // Not before: a signal would kill the program.
            tracing::info!(address = %self.address, "ready");
            let name = signals.next().await;
            tracing::info!("{name}: finishing what runs; the same again ends at once");
            Ok(signals)
        });
        let mut signals = signals.map_err(Error::Start)?;
        self.runtime.spawn(async move {
            signals.next().await;
            std::process::exit(1);
        });
        self.stop();
        Ok(())
    }

    /// Takes no more connections and requests, waits for those that run as long as the limits permit, and gives up what is left then.
    pub fn stop(self) {
        let Server { app, runtime, connections, .. } = self;
        let end = Instant::now() + app.limits.shutdown;
        app.closing.send_replace(true);
        app.loaded().for_each(Served::close);
        while Instant::now() < end && !(app.loaded().all(Served::has_ended) && connections.is_finished()) {
            std::thread::sleep(LOOK);
        }
        if !app.loaded().all(Served::has_ended) {
            tracing::warn!("giving up what still runs");
            app.loaded().for_each(Served::abort);
            // Enough to tell the clients. Runs on tensors end when nobody waits for them any more, that of a step with its step.
            let grace = Instant::now() + Duration::from_secs(2);
            while Instant::now() < grace && !(app.loaded().all(Served::has_ended) && connections.is_finished()) {
                std::thread::sleep(LOOK);
            }
        }
        connections.abort();
        runtime.shutdown_timeout(Duration::from_secs(1));
        tracing::info!("ended");
    }
}

/// Signals that ask the program to end.
struct Signals {
    #[cfg(unix)]
    term: tokio::signal::unix::Signal,
    #[cfg(unix)]
    interrupt: tokio::signal::unix::Signal,
}

impl Signals {
    #[cfg(unix)]
    fn new() -> std::io::Result<Signals> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Signals { term: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    #[cfg(unix)]
    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.term.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }

    #[cfg(not(unix))]
    fn new() -> std::io::Result<Signals> {
        Ok(Signals {})
    }

    #[cfg(not(unix))]
    async fn next(&mut self) -> &'static str {
        let _ = tokio::signal::ctrl_c().await;
        "Ctrl-C"
    }
}

/// All pages.
fn router(app: &Arc<App>) -> Router {
    Router::new()
        .merge(openai::routes())
        .merge(oip::routes())
        .route("/metrics", get(metrics))
        .route("/openapi.json", get(openapi))
        .route_service("/inference.GRPCInferenceService/{method}", oip::service(app.clone()))
        .fallback(door::nowhere)
        .method_not_allowed_fallback(door::no_method)
        .layer(CatchPanicLayer::custom(door::panicked))
        .layer(axum::middleware::from_fn_with_state(app.clone(), door::pass))
        .with_state(app.clone())
}

/// The measurements, as Prometheus reads them.
#[utoipa::path(get, path = "/metrics", responses((status = 200, body = String, content_type = "text/plain")))]
async fn metrics(State(app): State<Arc<App>>) -> String {
    app.measure();
    measure::handle().render()
}

/// Pages of no protocol, for `/openapi.json`.
#[derive(OpenApi)]
#[openapi(paths(metrics))]
struct Api;

async fn openapi(State(app): State<Arc<App>>) -> axum::Json<utoipa::openapi::OpenApi> {
    let mut api = Api::openapi();
    api.info = Info::new("moh-run serve", moh_runtime::short_version());
    api.merge(openai::Api::openapi());
    api.merge(oip::pages());
    if app.keys.is_some() {
        door::describe_keys(&mut api);
    }
    axum::Json(api)
}
