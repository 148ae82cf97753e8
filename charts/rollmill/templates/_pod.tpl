{{/* The pod of a service; of a dict with root, name and service. */}}
{{- define "rollmill.pod" -}}
{{- $values := .root.Values -}}
metadata:
  labels:
    {{- include "rollmill.labels" . | nindent 4 }}
  annotations:
    checksum/configuration: {{ include "rollmill.environment" . | sha256sum }}
    {{- with $values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "rollmill.fullname" .root }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  # A stopping service has its time to drain twice: for what is in hand, and for what that still sends.
  terminationGracePeriodSeconds: {{ add (mul 2 (int $values.drainSeconds)) 20 }}
  {{- with $values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- with $values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $values.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "rollmill.selector" . | nindent 10 }}
  {{- if include "rollmill.sandboxed" . }}
  hostUsers: false
  {{- end }}
  securityContext:
    {{- include "rollmill.podSecurity" .root | nindent 4 }}
  containers:
    - name: {{ .name }}
      image: {{ include "rollmill.image" . }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      {{- if eq .name "ledger" }}
      args: [rollmill, ledger, --metrics-host, 0.0.0.0, --metrics-port, "9400"]
      {{- end }}
      {{- with include "rollmill.variables" . | trim }}
      env:
        {{- . | nindent 8 }}
      {{- end }}
      envFrom:
        - configMapRef: { name: {{ include "rollmill.fullname" .root }}-{{ .name }} }
      ports:
        - { name: metrics, containerPort: 9400 }
        {{- if eq .name "capture" }}
        - { name: http, containerPort: 8700 }
        {{- end }}
      {{- include "rollmill.probes" . | nindent 6 }}
      {{- if eq .name "capture" }}
      # Until no load balancer sends anything new.
      lifecycle: { preStop: { exec: { command: [sleep, "5"] } } }
      {{- end }}
      securityContext:
        {{- include "rollmill.containerSecurity" .root | nindent 8 }}
        {{- if include "rollmill.sandboxed" . }}
        # bubblewrap makes namespaces and mounts, a fresh /proc among them.
        procMount: Unmasked
        seccompProfile: { type: Unconfined }
        appArmorProfile: { type: Unconfined }
        {{- end }}
      resources: {{- toYaml .service.resources | nindent 8 }}
      volumeMounts:
        {{- include "rollmill.mounts" . | nindent 8 }}
  volumes:
    {{- include "rollmill.volumes" . | nindent 4 }}
{{- end -}}

{{/*
A restore may take as long as it takes: /live answers meanwhile, /ready waits for it, and nothing kills it (rule C5).
A container that was fenced ends by itself after 30 seconds; liveness leaves it that long.
*/}}
{{- define "rollmill.probes" -}}
startupProbe:
  httpGet: { path: /live, port: metrics }
  periodSeconds: 2
  failureThreshold: 60
livenessProbe:
  httpGet: { path: /live, port: metrics }
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: { path: /ready, port: metrics }
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
{{- end -}}

{{- define "rollmill.mounts" -}}
- { name: tmp, mountPath: /tmp }
{{- if eq .name "capture" }}
- { name: spool, mountPath: /var/lib/rollmill/spool }
- { name: keys, mountPath: /etc/rollmill/keys, readOnly: true }
{{- end }}
{{- if eq .name "builder" }}
- { name: spill, mountPath: /var/lib/rollmill/spill }
{{- end }}
{{- if include "rollmill.kafkaFiles" .root }}
- { name: kafka, mountPath: /etc/rollmill/kafka, readOnly: true }
{{- end }}
{{- with .root.Values.volumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "rollmill.volumes" -}}
- name: tmp
  emptyDir: { sizeLimit: 1Gi }
{{- if eq .name "capture" }}
- name: keys
  secret:
    secretName: {{ required "services.capture.apiKeysSecret is missing: whoever reaches capture needs a key" .service.apiKeysSecret }}
    defaultMode: 0440
{{- end }}
{{- if eq .name "builder" }}
- name: spill
  emptyDir: { sizeLimit: {{ .service.spill.size }} }
{{- end }}
{{- if include "rollmill.kafkaFiles" .root }}
{{ include "rollmill.kafkaVolume" .root }}
{{- end }}
{{- with .root.Values.volumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}
