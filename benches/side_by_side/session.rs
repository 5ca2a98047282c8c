//! One session of the benchmark: which measurements, in which order, and what disturbed them.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write as _};

use anyhow::{Context as _, Result, ensure};
use nix::time::ClockId;
use serde::Serialize;

use crate::BenchArguments;
use crate::clock;
use crate::measure::{self, MeasureScale};
use crate::meter::{self, CpuTicks};
use crate::subject::{BenchSubject, ProviderProcess, ProxySettings, RunningSubject};
use crate::syscalls;
use crate::table::{ResultTable, RoundValue, median_of};

/// Makes the requested measurements and prints the table.
pub(crate) fn run(arguments: &BenchArguments) -> Result<()> {
    let mut session = BenchSession::new(arguments)?;
    session.measure_all()?;
    let conditions = session.host_conditions()?;
    let table = session.table.render(&session.subjects);
    writeln!(io::stdout(), "\n{table}\n{}", conditions.describe_trust())?;
    if let Some(file) = &arguments.json {
        let report = serde_json::json!({ "conditions": conditions, "table": session.table });
        fs::write(file, serde_json::to_vec_pretty(&report)?)
            .with_context(|| format!("writing `{}`", file.display()))?;
    }
    Ok(())
}

struct BenchSession {
    scale: MeasureScale,
    only: Vec<String>,
    subjects: Vec<BenchSubject>,
    setup: ProxySettings,
    cpus: Vec<usize>,
    table: ResultTable,
    disturbances: Vec<HostDisturbance>,
}

/// The conditions that tell how far the figures can be trusted.
#[derive(Serialize)]
struct HostConditions {
    versions: BTreeMap<&'static str, String>,
    processors: Vec<usize>,
    rounds: usize,
    /// Percent of the processors' time, median and maximum of all measurements.
    used_by_others: [f64; 2],
    stolen_by_hypervisor: [f64; 2],
}

/// The shares of the processors' time that the session did not have during one measurement.
struct HostDisturbance {
    others: f64,
    stolen: f64,
}

impl BenchSession {
    fn new(arguments: &BenchArguments) -> Result<Self> {
        let mut subjects = vec![];
        for subject in &arguments.subjects {
            match subject.binary() {
                Ok(_) => subjects.push(*subject),
                Err(missing) => writeln!(io::stderr(), "without {}: {missing}", subject.name())?,
            }
        }
        ensure!(!subjects.is_empty(), "nothing to measure");
        let mut scale = if arguments.quick { MeasureScale::QUICK } else { MeasureScale::FULL };
        scale.rounds = arguments.rounds.unwrap_or(scale.rounds);
        meter::raise_file_limit()?;
        Ok(Self {
            scale,
            only: arguments.only.clone(),
            subjects,
            setup: ProxySettings {
                workers: arguments.cpus,
                buffers_requests: arguments.request_buffering,
            },
            cpus: meter::confine_to_cpus(arguments.cpus)?,
            table: ResultTable::default(),
            disturbances: vec![],
        })
    }

    fn measure_all(&mut self) -> Result<()> {
        let scale = self.scale;
        self.measure_in_turns("unary-1", |running| measure::unary_alone(scale, running))?;
        self.table.compare("latency", BenchSubject::Direct);
        self.measure_in_turns("unary-16", |running| measure::unary_crowd(scale, running))?;
        self.measure_in_turns("prompt", |running| measure::long_prompt(scale, running))?;
        self.measure_in_turns("first-byte", |running| measure::first_byte(scale, running))?;
        for pace in scale.paces {
            let name = format!("streams-{}-{:?}", pace.0, pace.1);
            self.measure_in_turns(&name, |running| measure::measure_paced(scale, *pace, running))?;
        }
        self.measure_in_turns("unpaced", |running| measure::measure_unpaced(scale, running))?;
        self.measure_memory()?;
        self.measure_starts()?;
        self.system_calls()
    }

    /// Starts all subjects and measures one after the other, every round in the other direction.
    fn measure_in_turns(
        &mut self,
        name: &str,
        measure: impl Fn(&RunningSubject) -> Result<Vec<RoundValue>>,
    ) -> Result<()> {
        if !self.is_asked_for(name)? {
            return Ok(());
        }
        let provider = ProviderProcess::start()?;
        let running = self.start_all(&provider)?;
        for round in 0..self.scale.rounds {
            for (subject, running) in in_turn(&running, round) {
                let before = ClockReading::now(&self.cpus, &provider, running)?;
                let values = measure(running)
                    .with_context(|| format!("measuring `{name}` of {}", subject.name()))?;
                let after = ClockReading::now(&self.cpus, &provider, running)?;
                self.disturbances.push(after.disturbance_since(&before));
                self.record_values(*subject, values);
            }
        }
        Ok(())
    }

    /// Uses a new process each time, because used memory is not returned to the system.
    fn measure_memory(&mut self) -> Result<()> {
        if !self.is_asked_for("memory")? {
            return Ok(());
        }
        let provider = ProviderProcess::start()?;
        for _ in 0..self.scale.rounds.min(3) {
            for (subject, running) in self.start_all(&provider)? {
                self.record_values(subject, measure::measure_memory(self.scale, &running)?);
            }
        }
        Ok(())
    }

    fn measure_starts(&mut self) -> Result<()> {
        if !self.is_asked_for("start")? {
            return Ok(());
        }
        let provider = ProviderProcess::start()?;
        for _ in 0..self.scale.starts {
            for subject in self.subjects.clone() {
                self.record_values(
                    subject,
                    measure::measure_start(subject, &provider, self.setup)?,
                );
            }
        }
        Ok(())
    }

    fn system_calls(&mut self) -> Result<()> {
        if !syscalls::are_countable() || !self.is_asked_for("system-calls")? {
            return Ok(());
        }
        let provider = ProviderProcess::start()?;
        for (subject, running) in self.start_all(&provider)? {
            self.record_values(subject, measure::system_calls(self.scale, &running)?);
        }
        Ok(())
    }

    fn start_all(&self, provider: &ProviderProcess) -> Result<Vec<(BenchSubject, RunningSubject)>> {
        let start = |subject: &BenchSubject| {
            let running = RunningSubject::start(*subject, provider, self.setup)?;
            running.check().with_context(|| format!("checking {}", subject.name()))?;
            Ok((*subject, running))
        };
        self.subjects.iter().map(start).collect()
    }

    fn record_values(&mut self, subject: BenchSubject, values: Vec<RoundValue>) {
        for value in values {
            self.table.record(subject, value);
        }
    }

    fn is_asked_for(&self, name: &str) -> Result<bool> {
        let asked = self.only.is_empty() || self.only.iter().any(|only| name.contains(only));
        if asked {
            writeln!(io::stderr(), "{name}")?;
        }
        Ok(asked)
    }

    fn host_conditions(&self) -> Result<HostConditions> {
        let share = |of: fn(&HostDisturbance) -> f64| {
            let shares: Vec<f64> = self.disturbances.iter().map(|one| 100.0 * of(one)).collect();
            [median_of(&shares), shares.into_iter().fold(0.0, f64::max)]
        };
        let programs = self.subjects.iter().filter(|subject| **subject != BenchSubject::Direct);
        let versions = programs.map(|subject| Ok((subject.name(), subject.version()?)));
        Ok(HostConditions {
            versions: versions.collect::<Result<_>>()?,
            processors: self.cpus.clone(),
            rounds: self.scale.rounds,
            used_by_others: share(|one| one.others),
            stolen_by_hypervisor: share(|one| one.stolen),
        })
    }
}

impl HostConditions {
    fn describe_trust(&self) -> String {
        let versions: Vec<_> =
            self.versions.iter().map(|(name, of)| format!("{name}: {of}")).collect();
        let ([others, most], [stolen, most_stolen]) =
            (self.used_by_others, self.stolen_by_hypervisor);
        format!(
            "{}. Processors {:?}, {} rounds. During a measurement other programs used {others:.0} % \
             of them (median; at most {most:.0} %), the hypervisor took {stolen:.0} % (at most \
             {most_stolen:.0} %).",
            versions.join(", "),
            self.processors,
            self.rounds,
        )
    }
}

fn in_turn(
    running: &[(BenchSubject, RunningSubject)],
    round: usize,
) -> Box<dyn Iterator<Item = &(BenchSubject, RunningSubject)> + '_> {
    if round.is_multiple_of(2) { Box::new(running.iter()) } else { Box::new(running.iter().rev()) }
}

/// The clocks of the machine and of all processes of the session.
struct ClockReading {
    at: u64,
    ticks: CpuTicks,
    ours: u64,
    cpus: usize,
}

impl ClockReading {
    fn now(cpus: &[usize], provider: &ProviderProcess, running: &RunningSubject) -> Result<Self> {
        let client = clock::as_nanos(ClockId::CLOCK_PROCESS_CPUTIME_ID.now()?);
        Ok(Self {
            at: clock::monotonic_nanos(),
            ticks: CpuTicks::now(cpus)?,
            ours: client + provider.tree().cpu()? + running.tree().cpu()?,
            cpus: cpus.len(),
        })
    }

    fn disturbance_since(&self, before: &Self) -> HostDisturbance {
        let (busy, stolen) = self.ticks.since(before.ticks);
        let elapsed = (self.at - before.at) as f64 * self.cpus as f64;
        let ours = (self.ours - before.ours) as f64 / elapsed;
        HostDisturbance { others: (busy - ours).max(0.0), stolen }
    }
}
